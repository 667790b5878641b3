"""Chat messages -> text.

The files; each imports only what is listed above it:

    parts.py                parts of a content, arguments of a call
    conversation.py         messages in the form that templates get
    sglang_conversation.py  the same as SGLang has it
    bounded_jinja.py        Jinja's sandbox with a bound on the work of one rendering
    template.py             one chat template in its sandbox; the form of content it expects
    renderer.py             a model's templates: chat -> text
"""
