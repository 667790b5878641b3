"""Request bodies -> what to tokenise.

The files; each imports only what is listed above it:

    json_fields.py         reading parsed JSON, errors with place and rule
    tools.py               tool definitions in the form that templates get
    openai_request.py      bodies of a chat completion and of /v1/responses
    anthropic_request.py   body of /v1/messages
    splicing.py            fields of a body replaced or taken out; all other bytes stay
    rewriting.py           takes kv_cache_report_mode out of a body, puts a tenant's salt in
    pulling.py             puts in from which peer an engine is to pull
    retention.py           puts in what an engine is to keep; takes a client's own out, and peers
    priority.py            puts in the number by which an engine orders what waits
    decoding.py            bytes -> the fields of a body that anything here reads
    requests.py            any body -> what to tokenise
"""
