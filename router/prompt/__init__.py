"""Request body -> token ids, with LoRA name, salt and multimodal keys; exact, or marked as not.

    spec = parse_request(Endpoint.CHAT, body)            # pure; BadRequest is the client's
    body = strip_report_mode(body)                       # what may be sent on to an engine
    local = LocalTokenizer(read_model_files(directory))  # ModelFilesError is the operator's
    remote = RemoteTokenizer(fetch)                      # POST /tokenize at a replica
    tokenization = Tokenization(local=local, remote=remote)
    prompts = await tokenization.tokenize(spec)          # one TokenizedPrompt each

`TokenizedPrompt.coverage` names what the ids cover: the engine's whole prompt, a certain prefix of
it (a chat with images: up to before the message that holds the first one), or nothing (embeddings,
a template sent by the client, a conversation stored at the engine); `reason` then has the cause.
`token_ids` is an `array("I")`.

The files; each imports only what is listed above it:

    errors.py         exception tree
    processes.py      work on large bodies in processes of their own
    limits.py         bounds on one request
    endpoints.py      the request forms: paths, and what engines do there
    token_ids.py      token ids, and which of them an engine keeps
    prompts.py        the prompts of a request
    body/             request bodies -> what to tokenise
    model_files.py    a model's directory
    chat/             chat messages -> text
    local/            text -> token ids in the router
    remote.py         tokenisation at a replica
    tokenization.py   both for an event loop, with threads and counts
"""
