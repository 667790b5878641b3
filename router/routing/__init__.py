"""From a request's body to a decision: which replicas could serve it, best first. Knows no metrics.

The values of one request, in the order in which they are made, each handed from one room to the
next:

    bytes             the body, as the client sent it
    Terms             what else is known of it                                routing
    PromptSpec        what the body asks to be computed                       prompt
    Asked             these, with the model and the body to send              routing
    TokenizedPrompt   the token ids of one of its prompts                     prompt
    HashedPrompt      these, hashed                                           index
    Hit               what one source would reuse of a prompt                 index
    RouteRequest      what a policy may know of the request                   policies
    RankQuestion      what replicas are ranked for                            routing
    Candidate         one replica, with its hit and its load                  policies
    Ranked            a candidate in its place, with cost and reason          policies
    Decision          all of this, and the body to send                       routing
    RoutedRequest     the request in the log, from prediction to end          telemetry
    Attempt           where the decision may send it: origin and headers      plane
    ProxyRequest      what is sent there                                      plane
    Placement         which cache it meets there, and what it computes        routing

Two objects work on them: `Booking` (its life at a replica) and `RequestObserver`.

It also makes the hints that ask engines to keep a prefix, for the router knows where prompts part.
Engines keep windows and states sparsely: at the end of a prompt, and where a hit was cut short.
What will be asked for next only shows in the requests of the whole fleet.

The files; each imports only what is listed above it:

    fading.py              a ratio in which the past fades
    branches.py            where prompts part, and whether sessions go on
    tails.py               where a new prompt will part from later ones
    steering.py            the retention hints of a request by these, and what came of them
    admission.py           how many requests are let in, and whether any
    recent_prefixes.py     which prefixes were just sent where
    stored_responses.py    which replica has which stored response
    key_holders.py         the salts and the responses of the holders of keys
    terms.py               what else is known of a request besides its body
    versions.py            which version of a model a request gets
    model.py               one model: names, index, hints
    models.py              models and every name they go by, each with index and tokenisation
    lengths.py             how long a prompt may be
    question.py            one request, as replicas are ranked for it, and where it goes
    booking.py             one request where it is sent and in its cache, from there to its end
    fleets.py              updates the compiled core with the replicas and their state
    planner.py             hits, load and policy -> a ranking of replicas, which the core makes
    prefill.py             does another replica compute the prompt, and which one?
    prefill_requests.py    has it computed there, where no sidecar does
    replica_tokenizers.py  which replica is asked for token ids; do they tokenise as we do?
    decision.py            one request's replicas, chosen again at each attempt
    deciding.py            what the doors ask of routing
    dispatcher.py          a request's body -> a decision
"""
