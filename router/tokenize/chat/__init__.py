"""Chat messages -> text.

The files; each imports only what is listed above it:

    conversation.py   messages in the form that templates get
    content_form.py   which form a template expects
    template.py       one chat template in its sandbox
    renderer.py       a model's templates: chat -> text
"""
