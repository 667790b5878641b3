"""Request body -> token ids, with LoRA name, salt and multimodal keys; exact, or marked as not.

    spec = parse_request(Endpoint.CHAT, body)            # pure; RequestBodyError is the client's
    body = strip_report_mode(body, spec)                 # what may be sent on to an engine
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
    prompts.py        the prompts of a request, and their ids
    body/             request bodies -> what to tokenise
    model_files.py    a model's directory
    chat/             chat messages -> text
    truncation.py     truncate_prompt_tokens
    local/            text -> token ids in the router
    remote.py         tokenisation at a replica
    tokenization.py   both for an event loop, with threads and counts
"""

from router.prompt.body.decoding import holds_mostly_ids
from router.prompt.body.json_fields import check_int64
from router.prompt.body.priority import PRIORITY_HEADER, with_priority
from router.prompt.body.pulling import with_source
from router.prompt.body.requests import parse_request, read_model, read_request
from router.prompt.body.retention import HintForm, with_hints
from router.prompt.body.rewriting import strip_report_mode, tenant_salt_of, with_tenant_salt
from router.prompt.body.splicing import with_model
from router.prompt.chat.renderer import ChatSettings
from router.prompt.endpoints import FORMS, PROMPT_ENDPOINTS, Endpoint
from router.prompt.errors import (
    ModelFilesError,
    ProcessEndedError,
    ReplicaAnswerError,
    RequestBodyError,
    UntokenizableError,
)
from router.prompt.limits import PromptLimits
from router.prompt.local.tokenizer import LocalTokenizer
from router.prompt.model_files import ModelFiles, read_model_files
from router.prompt.processes import LargeWork
from router.prompt.prompts import (
    NO_ENDS,
    ChatPrompt,
    Coverage,
    MessageEnds,
    OpaquePrompt,
    PromptSpec,
    TextPrompt,
    TokenIds,
    TokenizedPrompt,
    TokenPrompt,
    Truncation,
)
from router.prompt.remote import RemoteTokenizer
from router.prompt.tokenization import Tokenization, TokenizationStatistics

__all__ = [
    "FORMS",
    "NO_ENDS",
    "PRIORITY_HEADER",
    "PROMPT_ENDPOINTS",
    "ChatPrompt",
    "ChatSettings",
    "Coverage",
    "Endpoint",
    "HintForm",
    "LargeWork",
    "LocalTokenizer",
    "MessageEnds",
    "ModelFiles",
    "ModelFilesError",
    "OpaquePrompt",
    "ProcessEndedError",
    "PromptLimits",
    "PromptSpec",
    "RemoteTokenizer",
    "ReplicaAnswerError",
    "RequestBodyError",
    "TextPrompt",
    "TokenIds",
    "TokenPrompt",
    "Tokenization",
    "TokenizationStatistics",
    "TokenizedPrompt",
    "Truncation",
    "UntokenizableError",
    "check_int64",
    "holds_mostly_ids",
    "parse_request",
    "read_model",
    "read_model_files",
    "read_request",
    "strip_report_mode",
    "tenant_salt_of",
    "with_hints",
    "with_model",
    "with_priority",
    "with_source",
    "with_tenant_salt",
]
