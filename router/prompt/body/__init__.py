"""Request bodies -> prompts to tokenise.

The files; each imports only what is listed above it:

    json_fields.py         reading parsed JSON, errors with place and rule
    tools.py               tool definitions in the form that templates get
    template_arguments.py  the variables that a request adds to its chat template
    sglang_messages.py     the chat that SGLang makes of /v1/messages
    sglang_request.py      chats as SGLang reads them
    openai_request.py      bodies of a chat completion and of /v1/responses
    anthropic_request.py   body of /v1/messages
    splicing.py            fields of a body replaced or taken out; all other bytes stay
    owned_fields.py        puts in what the router tells engines; takes a client's own out
    transfer_fields.py     what engines get of a prompt that one computes for another
    salting.py             puts a tenant's salt in
    decoding.py            bytes -> the fields of a body that anything here reads
    requests.py            any body -> prompts to tokenise
"""
