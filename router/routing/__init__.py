"""From a request's body to a decision: which replicas could serve it, best first. Knows no metrics.

The values of one request, in the order in which they are made, each handed from one room to the
next:

    bytes             the body, as the client sent it
    Terms             what else is known of it                                routing
    PromptSpec        what the body asks to be computed                       tokenize
    TokenizedPrompt   the token ids of one of its prompts                     tokenize
    HashedPrompt      these, hashed                                           index
    Hit               what one source would reuse of a prompt                 index
    RouteRequest      what a policy may know of the request                   scoring
    Candidate         one replica, with its hit and its load                  scoring
    Ranked            a candidate in its place, with cost and reason          scoring
    Decision          all of this, and the body to send                       routing
    RoutedRequest     the request in the log, from prediction to end          observability
    Attempt           where the decision may send it: origin and headers      proxy
    ProxyRequest      what is sent there                                      proxy

Two objects work on them: `InFlight` (its share of a replica's load) and `RequestObserver`.

The files; each imports only what is listed above it:

    admission.py           how many requests are let in, and whether any
    recent_prefixes.py     which prefixes were just sent where
    stored_responses.py    which replica has which stored response
    terms.py               what else is known of a request besides its body
    versions.py            which version of a model a request gets
    models.py              models and every name they go by, each with index and tokenisation
    lengths.py             how long a prompt may be
    fleets.py              tells the compiled core which replicas there are, and how they are
    ranker.py              has the core rank by a policy of its own, or by a plug-in
    planner.py             hits, load and policy -> a ranking of replicas
    replica_tokenizers.py  which replica is asked for token ids; do they tokenise as we do?
    decision.py            one request's: where it may be sent, chosen anew at each attempt
    dispatcher.py          a request's body -> a decision
"""
