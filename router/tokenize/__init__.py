"""Request body -> token ids (with LoRA name, salt and multimodal keys), exact to the token or
marked as not.

    spec = parse_request(Endpoint.CHAT, body)              # pure; RequestBodyError is the client's 400
    body = strip_report_mode(body, spec)                   # what may be sent on to an engine
    local = LocalTokenizer(read_model_files(directory))    # ModelFilesError is the operator's
    remote = RemoteTokenizer(fetch)                        # POST /tokenize at a replica
    tokenization = Tokenization(local=local, remote=remote)
    prompts = await tokenization.tokenize(spec, lora_name=None)   # one TokenizedPrompt each, raises nothing
    tokenization.statistics()

``TokenizedPrompt.coverage`` says what the ids are: the engine's whole prompt, a certain prefix of
it (a chat with images: up to before the message that holds the first one), or nothing (embeddings,
a template sent by the client, a conversation stored at the engine); ``reason`` then says why.
``token_ids`` is an ``array("I")``.

The files, each importing only what stands above it:

    errors.py              the error tree
    limits.py              bounds on one request
    prompts.py             the values: PromptSpec and its prompts, TokenizedPrompt
    fields.py              reading parsed JSON, errors with place and rule
    tools.py               tool definitions in the form that templates get
    chat_request.py        body of a chat completion
    responses_request.py   body of /v1/responses
    anthropic_request.py   body of /v1/messages
    report_mode.py         taking kv_cache_report_mode out of a body
    requests.py            body -> PromptSpec
    model_files.py         a model directory
    conversation.py        messages in the form that templates get
    content_form.py        which form a template expects
    template.py            one chat template in its sandbox
    chat.py                the templates of a model: ChatPrompt -> text
    backend.py             a tokenizers.Tokenizer set up as the engine's
    matcher.py             strings -> a leftmost-longest regular expression
    segments.py            where a text may be cut; every rule with its reason
    cutting.py             deciding it at load, with a self-test
    cache.py               token ids by segment
    ends.py                special tokens around a prompt
    truncation.py          truncate_prompt_tokens
    local.py               tokenisation in the router
    remote.py              tokenisation at a replica
    agreement.py           do router and replica agree?
    tokenization.py        both for an event loop, with threads and counts
"""

from router.tokenize.agreement import Disagreement, find_disagreements
from router.tokenize.cache import SegmentCacheStatistics
from router.tokenize.chat import ChatSettings
from router.tokenize.errors import (
    ModelFilesError,
    ReplicaAnswerError,
    RequestBodyError,
    TokenizeError,
    UntokenizableError,
)
from router.tokenize.limits import PromptLimits
from router.tokenize.local import LocalStatistics, LocalTokenizer
from router.tokenize.model_files import ModelFiles, read_model_files
from router.tokenize.prompts import (
    ChatPrompt,
    Coverage,
    Endpoint,
    OpaquePrompt,
    PromptSpec,
    TextPrompt,
    TokenIds,
    TokenizedPrompt,
    TokenPrompt,
    Truncation,
)
from router.tokenize.remote import Fetch, RemoteStatistics, RemoteTokenizer
from router.tokenize.report_mode import strip_report_mode
from router.tokenize.requests import parse_request
from router.tokenize.tokenization import PromptTokenizer, Tokenization, TokenizationStatistics

__all__ = [
    "ChatPrompt",
    "ChatSettings",
    "Coverage",
    "Disagreement",
    "Endpoint",
    "Fetch",
    "LocalStatistics",
    "LocalTokenizer",
    "ModelFiles",
    "ModelFilesError",
    "OpaquePrompt",
    "PromptLimits",
    "PromptSpec",
    "PromptTokenizer",
    "RemoteStatistics",
    "RemoteTokenizer",
    "ReplicaAnswerError",
    "RequestBodyError",
    "SegmentCacheStatistics",
    "TextPrompt",
    "TokenIds",
    "TokenPrompt",
    "Tokenization",
    "TokenizationStatistics",
    "TokenizeError",
    "TokenizedPrompt",
    "Truncation",
    "UntokenizableError",
    "find_disagreements",
    "parse_request",
    "read_model_files",
    "strip_report_mode",
]
