"""Request bodies -> what to tokenise.

The files; each imports only what is listed above it:

    json_fields.py         reading parsed JSON, errors with place and rule
    tools.py               tool definitions in the form that templates get
    chat_request.py        body of a chat completion
    anthropic_request.py   body of /v1/messages
    responses_request.py   body of /v1/responses
    rewriting.py           takes kv_cache_report_mode out of a body, puts a tenant's salt in
    requests.py            any body -> what to tokenise
"""
