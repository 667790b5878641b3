"""Request body -> `PromptSpec`: pure parsing, no tokenizer needed.

Only fields that shape the prompt are checked; the engine judges everything else. Unknown fields are
ignored: the proxy forwards the body unchanged.
"""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any, TypeAlias, TypeGuard

import msgspec
from msgspec.structs import replace

from kvevents.errors import UNREADABLE
from router.errors import BadRequest
from router.prompt.body.anthropic_request import parse_messages
from router.prompt.body.decoding import RETENTION_FIELD, SESSION_FIELDS, decode_fields
from router.prompt.body.json_fields import (
    as_count,
    check_int64,
    check_shape,
    is_true,
    optional_object,
    optional_text,
    required,
)
from router.prompt.body.openai_request import parse_chat, parse_responses
from router.prompt.body.owned_fields import (
    ARGUMENTS_FIELD,
    PRIORITY_FIELD,
    SAMPLING_FIELD,
    TRANSFER_FIELD,
    strip_hints,
    strip_report_mode,
)
from router.prompt.body.salting import SALT_FIELD, tenant_salt_of, with_tenant_salt
from router.prompt.body.splicing import without_fields
from router.prompt.endpoints import FORMS, Encoding, Endpoint
from router.prompt.errors import describe
from router.prompt.limits import MAX_PROMPT_CHARS, MAX_PROMPT_TOKENS, MAX_PROMPTS, MAX_SALT_CHARS
from router.prompt.prompts import (
    ChatPrompt,
    OpaquePrompt,
    Prompt,
    PromptSpec,
    TextPrompt,
    TokenPrompt,
)
from router.prompt.token_ids import MODEL_LENGTH, TokenIds, Truncation

_MAX_SESSION_CHARS = 512
_TOKEN_RULE = "a token id must be an integer from 0 to 4294967295"
_PROMPT_RULE = "must be a string, a list of strings, a list of token ids or a list of such lists"
_IDS_RULE = "must be a list of token ids or a list of such lists"
_ID_LIST_RULE = "must be a list of token ids"

_WITH_SESSION = frozenset((*SESSION_FIELDS, ARGUMENTS_FIELD, "metadata"))
_FOR_LOGPROBS = frozenset(("prompt_logprobs", "echo"))
_SKIPS_CACHE = "skip_reading_prefix_cache"
_TAKE_FORWARDED_IDS = (Endpoint.CHAT, Endpoint.RESPONSES, Endpoint.MESSAGES)
_FORWARDED = "prompt_token_ids"
_OF_SAMPLING = ("n", "prompt_logprobs", "prompt_logprob_token_ids", _SKIPS_CACHE)


def parse_request(
    endpoint: Endpoint,
    body: bytes,
    *,
    encoding: Encoding = "json",
) -> PromptSpec:
    """Read all that routing needs from a request body.

    A million token ids would take some 50 ms as a Python list; packed they take a quarter. A chat
    of 100 KB takes some 0.5 ms. Fields that nothing reads are skipped.

    Args:
        body: The bytes as received; the caller has bounded their number.
        encoding: `msgpack` only where the caller offers it (`/route`).
    Raises:
        BadRequest: The body is malformed, or its prompt breaks a rule.
    """
    fields = decode_fields(body, encoding, endpoint)
    form = _route_form(fields) if endpoint is Endpoint.ROUTE else endpoint
    if PRIORITY_FIELD in fields:
        check_int64(fields[PRIORITY_FIELD], f"$.{PRIORITY_FIELD}")
    if form is Endpoint.GENERATE:
        fields = _with_sampling(fields)
    model = _model(fields, endpoint)
    prompts = _PARSERS[form](fields, _truncation(fields, form))
    if TRANSFER_FIELD in fields and form in _TAKE_FORWARDED_IDS:
        prompts = tuple(_with_forwarded_ids(prompt, fields[TRANSFER_FIELD]) for prompt in prompts)
    adapters = _adapters(fields, endpoint)
    return PromptSpec(
        endpoint=form,
        model=model,
        prompts=prompts,
        stream="stream" in fields and is_true(fields["stream"]),
        choices=(as_count(fields["n"]) or 1) if "n" in fields else 1,
        cache_salt=_salt(fields, form, len(prompts)) if "cache_salt" in fields else None,
        lora_name=adapters[0] if len(adapters) == 1 else None,
        adapters=tuple(each for each in adapters if each is not None),
        session=_session(fields),
        body_bytes=len(body),
        reads_cache=_reads_cache(fields, form),
        stored_response=_stored_response(fields) if form is Endpoint.RESPONSES else None,
        has_engine_arguments=ARGUMENTS_FIELD in fields or SAMPLING_FIELD in fields,
        has_priority=PRIORITY_FIELD in fields,
        has_transfer_params=TRANSFER_FIELD in fields,
        keeps_prompt=fields.get(RETENTION_FIELD) is not None,
    )


def _model(fields: Mapping[str, Any], endpoint: Endpoint) -> str | None:
    """Read the model; selection services use the longer name."""
    model = optional_text(fields, "model", "$")
    if model is None and endpoint is Endpoint.ROUTE:
        return optional_text(fields, "model_name", "$")
    return model


def _adapters(fields: Mapping[str, Any], endpoint: Endpoint) -> tuple[str | None, ...]:
    """Read the adapters that are named beside the model, each once; None is the model itself.
    `lora_path` is SGLang's, and may be a list with one for each prompt."""
    if endpoint is Endpoint.ROUTE and (named := optional_text(fields, "lora_name", "$")):
        return (named,)
    given = fields.get("lora_path")
    each = given if isinstance(given, list) else [given]
    return tuple(dict.fromkeys(one if isinstance(one, str) and one else None for one in each))


def _with_sampling(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields, with those that this form has in an object of its own."""
    given = fields.get(SAMPLING_FIELD)
    if not isinstance(given, dict):
        return fields
    return {name: given[name] for name in _OF_SAMPLING if name in given} | fields


def _salt(
    fields: Mapping[str, Any], form: Endpoint, prompts: int
) -> str | tuple[str | None, ...] | None:
    """Read one salt, or one for each prompt of a batch, as SGLang takes them. SGLang ignores an
    empty one; vLLM refuses it itself."""
    given = fields.get("cache_salt")
    if form is not Endpoint.COMPLETIONS or not isinstance(given, list):
        return optional_text(fields, "cache_salt", "$", MAX_SALT_CHARS) or None
    if len(given) != prompts:
        rule = f"must have as many salts as there are prompts, {prompts}"
        raise BadRequest("$.cache_salt", describe(given), rule)
    salts = {str(place): salt for place, salt in enumerate(given)}
    return tuple(
        optional_text(salts, name, "$.cache_salt", MAX_SALT_CHARS) or None for name in salts
    )


def _route_form(fields: Mapping[str, Any]) -> Endpoint:
    """Return which form a `/route` body has: it may name it, else its fields do."""
    named = fields.get("endpoint")
    if named is not None:
        known = [form.value for form in Endpoint]
        if named not in known:
            raise BadRequest("$.endpoint", describe(named), f"must be one of {', '.join(known)}")
        return Endpoint(named)
    if "token_ids" in fields:
        return Endpoint.ROUTE
    for name, form in (
        ("messages", Endpoint.CHAT),
        ("prompt", Endpoint.COMPLETIONS),
        ("input", Endpoint.RESPONSES),
    ):
        if name in fields:
            return form
    raise BadRequest("$", describe(fields), "must have token_ids, messages, prompt or input")


def _truncation(fields: Mapping[str, Any], form: Endpoint) -> Truncation | None:
    """Read `truncate_prompt_tokens`; -1 means the model's own length. The responses API has
    `truncation` instead, and `/v1/messages` neither."""
    if form is Endpoint.RESPONSES:
        is_cut = fields.get("truncation", "disabled") != "disabled"
        return Truncation(MODEL_LENGTH, "left", counts_special_tokens=False) if is_cut else None
    if form is Endpoint.MESSAGES or "truncate_prompt_tokens" not in fields:
        return None
    given = fields["truncate_prompt_tokens"]
    is_minus_one = not isinstance(given, bool) and given in (-1, "-1")
    count = MODEL_LENGTH if is_minus_one else as_count(given)
    if count is None:
        return None
    side = fields.get("truncation_side")
    if side == "left" or side == "right":
        return Truncation(count, side, counts_special_tokens=True)
    return Truncation(
        count, "left" if FORMS[form].generates else "right", counts_special_tokens=False
    )


def _reads_cache(fields: Mapping[str, Any], form: Endpoint) -> bool:
    """Return whether the engine looks for the prompt in its cache: not where logprobs of the prompt
    itself are asked for, unless the parameters of `/inference/v1/generate` say so."""
    if form is Endpoint.GENERATE and fields.get(_SKIPS_CACHE) is not None:
        return not is_true(fields[_SKIPS_CACHE])
    return not _asks_for_prompt_logprobs(fields, form)


def _asks_for_prompt_logprobs(fields: Mapping[str, Any], form: Endpoint) -> bool:
    """Return whether prompt logprobs are asked for: by name, or by an echo with logprobs, which in
    vLLM (0.32) a chat has always and a completion if it asks for them."""
    if form is Endpoint.GENERATE and fields.get("prompt_logprob_token_ids") is not None:
        return True
    if _FOR_LOGPROBS.isdisjoint(fields):
        return False
    if fields.get("prompt_logprobs") is not None:
        return True
    return is_true(fields.get("echo")) and (
        form in (Endpoint.CHAT, Endpoint.CHAT_BATCH) or fields.get("logprobs") is not None
    )


def _session(fields: Mapping[str, Any]) -> str | None:
    if _WITH_SESSION.isdisjoint(fields):
        return None
    arguments, metadata = fields.get(ARGUMENTS_FIELD), fields.get("metadata")
    hints = [fields.get(name) for name in SESSION_FIELDS]
    hints.append(arguments.get("session_id") if isinstance(arguments, dict) else None)
    hints.append(metadata.get("user_id") if isinstance(metadata, dict) else None)
    return next(
        (hint[:_MAX_SESSION_CHARS] for hint in hints if isinstance(hint, str) and hint), None
    )


def _stored_response(fields: Mapping[str, Any]) -> str | None:
    named = fields.get("previous_response_id")
    return named if isinstance(named, str) and named else None


def _with_forwarded_ids(prompt: Prompt, transfer: object) -> Prompt:
    """Return a chat with the token ids that are forwarded with it; ids that break a rule are for
    the engine to refuse."""
    ids = transfer.get(_FORWARDED) if isinstance(transfer, dict) else None
    if not isinstance(prompt, ChatPrompt) or not isinstance(ids, list):
        return prompt
    if len(ids) > MAX_PROMPT_TOKENS or set(map(type, ids)) != {int}:
        return prompt
    try:
        return dataclasses.replace(prompt, forwarded_ids=array("I", ids))
    except OverflowError:
        return prompt


def _chats(
    fields: Mapping[str, Any],
    truncation: Truncation | None,
    *,
    add_generation_prompt: bool = True,
) -> tuple[Prompt, ...]:
    """Read several conversations, which share all other fields."""
    rule = "must be a list of conversations, each a list of messages"
    given = required(fields, "messages", "$", rule)
    if not isinstance(given, list) or not given:
        found = "an empty list" if given == [] else describe(given)
        raise BadRequest("$.messages", found, rule)
    if len(given) > MAX_PROMPTS:
        most = f"must have at most {MAX_PROMPTS} conversations"
        raise BadRequest("$.messages", describe(given), most)
    for index, conversation in enumerate(given):
        if not isinstance(conversation, list):
            place = f"$.messages[{index}]"
            raise BadRequest(place, describe(conversation), "must be a list of messages")
    check_shape(given, "$.messages")
    return tuple(
        parse_chat(
            {**fields, "messages": conversation},
            truncation,
            add_generation_prompt=add_generation_prompt,
        )
        for conversation in given
    )


def _generate(
    fields: Mapping[str, Any],
    truncation: Truncation | None,  # noqa: ARG001 - this form cuts nothing
) -> tuple[Prompt, ...]:
    """Read token ids as the engine computes them; with media among them, up to the first one."""
    if fields.get("content_parts"):
        return (OpaquePrompt("media"),)
    value = required(fields, "token_ids", "$", _ID_LIST_RULE)
    if not isinstance(value, (list, array)):
        raise BadRequest("$.token_ids", describe(value), _ID_LIST_RULE)
    if not value:
        raise BadRequest("$.token_ids", "an empty list", "must hold at least one token id")
    ids = _token_ids(value, "$.token_ids")
    features = optional_object(fields, "features", "$")
    if not features:
        return (TokenPrompt(ids),)
    start = _first_medium(features)
    return (OpaquePrompt("media") if start is None else TokenPrompt(ids[:start], is_prefix=True),)


def _first_medium(features: Mapping[str, Any]) -> int | None:
    """Return where the first medium's ids begin; None where that cannot be read."""
    by_kind = features.get("mm_placeholders")
    ranges = list(chain.from_iterable(by_kind.values())) if _holds_lists(by_kind) else []
    starts = [as_count(each.get("offset")) for each in ranges if isinstance(each, dict)]
    known = [start for start in starts if start is not None]
    return min(known) if known and len(known) == len(ranges) else None


def _holds_lists(value: object) -> TypeGuard[dict[str, list[Any]]]:
    return isinstance(value, dict) and all(isinstance(item, list) for item in value.values())


def _completions(fields: Mapping[str, Any], truncation: Truncation | None) -> tuple[Prompt, ...]:
    embeddings = fields.get("prompt_embeds")
    if embeddings:
        count = len(embeddings) if isinstance(embeddings, list) else 1
        return (OpaquePrompt("prompt_embeds"),) * min(count, MAX_PROMPTS)
    prompts = _text_or_tokens(fields, "prompt", truncation)
    if fields.get("suffix"):
        # Engines write both into one text, between tokens of the model's own.
        return tuple(
            OpaquePrompt("suffix") if isinstance(prompt, TextPrompt) else prompt
            for prompt in prompts
        )
    return prompts


def _embeddings(fields: Mapping[str, Any], truncation: Truncation | None) -> tuple[Prompt, ...]:
    """Read texts or token ids, one conversation, or as in vLLM several."""
    messages = fields.get("messages")
    if isinstance(messages, list) and messages and isinstance(messages[0], list):
        return _chats(fields, truncation, add_generation_prompt=False)
    if messages is not None:
        return (parse_chat(fields, truncation, add_generation_prompt=False),)
    if _holds_objects(fields.get("input")):
        return (OpaquePrompt("unknown_input_item"),)
    return _text_or_tokens(fields, "input", truncation)


def _holds_objects(value: object) -> bool:
    """Return whether a list has objects, or lists that begin with one: messages, or media."""
    return isinstance(value, list) and any(
        isinstance(item, dict) or (isinstance(item, list) and isinstance(next(iter(item), 0), dict))
        for item in value
    )


def _route(fields: Mapping[str, Any], truncation: Truncation | None) -> tuple[Prompt, ...]:
    """Read token ids: who sends them as text would be told of the hit of another prompt."""
    value = required(fields, "token_ids", "$", _IDS_RULE)
    if not isinstance(value, (list, array)):
        raise BadRequest("$.token_ids", describe(value), _IDS_RULE)
    prompts = _text_or_tokens(fields, "token_ids", truncation)
    for index, prompt in enumerate(prompts):
        if isinstance(prompt, TextPrompt):
            raise BadRequest(f"$.token_ids[{index}]", describe(value[index]), _ID_LIST_RULE)
    return prompts


_Parser: TypeAlias = Callable[[Mapping[str, Any], Truncation | None], tuple[Prompt, ...]]


def _one(
    parse: Callable[[Mapping[str, Any], Truncation | None], Prompt],
) -> _Parser:
    """The parser of a form that holds one prompt."""
    return lambda fields, truncation: (parse(fields, truncation),)


_PARSERS: Mapping[Endpoint, _Parser] = {
    Endpoint.CHAT: _one(parse_chat),
    Endpoint.COMPLETIONS: _completions,
    Endpoint.RESPONSES: _one(parse_responses),
    Endpoint.MESSAGES: _one(parse_messages),
    Endpoint.EMBEDDINGS: _embeddings,
    Endpoint.CHAT_BATCH: _chats,
    Endpoint.GENERATE: _generate,
    Endpoint.ROUTE: _route,
}


def _text_or_tokens(
    fields: Mapping[str, Any], name: str, truncation: Truncation | None
) -> tuple[Prompt, ...]:
    """Read one prompt or a batch, each a string or a list of token ids."""
    place, value = f"$.{name}", required(fields, name, "$", _PROMPT_RULE)
    add_special_tokens = is_true(fields.get("add_special_tokens", True))
    if isinstance(value, list) and not value:
        raise BadRequest(place, "an empty list", "must hold at least one prompt or token id")
    if not isinstance(value, list) or not isinstance(value[0], (str, list)):
        return (_prompt(value, place, _PROMPT_RULE, truncation, add_special_tokens),)
    if len(value) > MAX_PROMPTS:
        raise BadRequest(place, describe(value), f"must have at most {MAX_PROMPTS} prompts")
    rule = "must be a string or a list of token ids"
    return tuple(
        _prompt(item, f"{place}[{index}]", rule, truncation, add_special_tokens)
        for index, item in enumerate(value)
    )


def _prompt(
    value: object,
    place: str,
    rule: str,
    truncation: Truncation | None,
    add_special_tokens: bool,
) -> Prompt:
    if isinstance(value, (list, array)):
        return TokenPrompt(_token_ids(value, place), truncation)
    if not isinstance(value, str):
        raise BadRequest(place, describe(value), rule)
    if len(value) > MAX_PROMPT_CHARS:
        raise BadRequest(place, describe(value), f"must have at most {MAX_PROMPT_CHARS} characters")
    return TextPrompt(value, add_special_tokens, truncation)


def _token_ids(values: list[Any] | TokenIds, place: str) -> TokenIds:
    if len(values) > MAX_PROMPT_TOKENS:
        found = f"a list of {len(values)} items"
        raise BadRequest(place, found, f"must have at most {MAX_PROMPT_TOKENS} token ids")
    if isinstance(values, array):
        return values
    # The array takes true for 1, so the types are looked at first; both run in C over the whole
    # list. Engines take 1.0 for 1.
    types = set(map(type, values))
    if types == {int} or (types <= {int, float} and all(map(_is_whole, values))):
        try:
            return array("I", values if types == {int} else map(int, values))
        except OverflowError:
            pass
    raise _bad_token_id(values, place)


def _is_whole(value: int | float) -> bool:
    return isinstance(value, int) or value.is_integer()


def _bad_token_id(values: list[Any], place: str) -> BadRequest:
    for index, value in enumerate(values):
        if type(value) is not int and not (type(value) is float and value.is_integer()):
            return BadRequest(f"{place}[{index}]", describe(value), _TOKEN_RULE)
        if not 0 <= value < 2**32:
            return BadRequest(f"{place}[{index}]", "an integer out of range", _TOKEN_RULE)
    return BadRequest(place, describe(values), _TOKEN_RULE)


def read_request(
    body: bytes,
    endpoint: Endpoint,
    encoding: Encoding,
    tenant_salt: bytes | None = None,
    drops_priority: bool = False,
) -> tuple[PromptSpec, bytes | None]:
    """Read a body, take out the fields that the router owns, and put a tenant's salt in.

    Args:
        drops_priority: True to take the client's `priority` out.
    Returns:
        Its fields, with the tenant's salt; and the body to send, None if that is *body*.
    Raises:
        BadRequest: See `parse_request`.
    """
    spec = parse_request(endpoint, body, encoding=encoding)
    is_sent = endpoint is not Endpoint.ROUTE
    changed = strip_report_mode(body) if is_sent and spec.has_engine_arguments else body
    if changed is not body:
        spec = replace(spec, has_report_mode=True)
    if is_sent and drops_priority and spec.has_priority:
        changed = without_fields(changed, PRIORITY_FIELD)
    if is_sent and (spec.has_engine_arguments or spec.has_transfer_params):
        changed = strip_hints(changed)
    if tenant_salt is not None:
        own = spec.cache_salt
        salts = (
            tuple(tenant_salt_of(tenant_salt, each) for each in own)
            if isinstance(own, tuple)
            else tenant_salt_of(tenant_salt, own)
        )
        spec = replace(spec, cache_salt=salts)
        changed = with_tenant_salt(changed, tenant_salt) if is_sent else body
    return spec, None if changed is body else changed


class _ModelAndPriority(msgspec.Struct):
    model: str | None = None
    priority: Any = None


def read_model(
    body: bytes,
    tenant_salt: bytes | None = None,
    salt_names: Sequence[str] = (SALT_FIELD,),
    drops_priority: bool = False,
) -> tuple[str | None, bytes | None]:
    """Read the model that any JSON body names, and change it as `read_request` does; the rest is
    skipped.

    Returns:
        The model, None if it names none; and the body to send, None if that is *body*.
    Raises:
        BadRequest: It is not a JSON object, its model is not a string, or its priority breaks
            a rule.
    """
    try:
        read = msgspec.json.decode(body, type=_ModelAndPriority)
    except UNREADABLE:
        raise BadRequest(
            "$", f"{len(body)} bytes", "must be a JSON object whose `model` is a string"
        ) from None
    check_int64(read.priority, f"$.{PRIORITY_FIELD}")
    changed = without_fields(body, PRIORITY_FIELD) if drops_priority else body
    if tenant_salt is not None and salt_names:
        changed = with_tenant_salt(changed, tenant_salt, salt_names)
    return read.model, None if changed is body else changed
