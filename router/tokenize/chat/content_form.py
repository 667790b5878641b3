"""Does a chat template loop over the parts of a message's content, or write the content as it is?

vLLM's server decides it by looking at the template's syntax tree, and so do we: the answer changes
the text. The question is whether there is a loop over the content of a message, where a *message*
is what a loop over `messages` (or over a variable set from it) runs through, and *content* is its
field of that name, the argument of a macro that is called with it, or, outside of macros, a
variable called `content`.
"""

from __future__ import annotations

from collections.abc import Iterator

from jinja2 import nodes

from router.tokenize.chat.conversation import ContentForm


def content_form(tree: nodes.Template) -> ContentForm:
    """Tell the form of content that the template of this syntax tree expects."""
    messages = _message_names(tree, _aliases(tree, "messages"))
    loops = [loop for loop in tree.find_all(nodes.For) if isinstance(loop.target, nodes.Name)]
    in_macros = {
        id(loop) for macro in tree.find_all(nodes.Macro) for loop in macro.find_all(nodes.For)
    }
    if any(_is_content_of(loop.iter, messages) for loop in loops):
        return "openai"
    if any(_is_name(loop.iter, {"content"}) and id(loop) not in in_macros for loop in loops):
        return "openai"
    if any(
        _loops_over_content_argument(macro, tree, messages) for macro in tree.find_all(nodes.Macro)
    ):
        return "openai"
    return "string"


def _peel(node: nodes.Node) -> nodes.Node:
    """Remove what leaves the elements the same: filters, tests and slices."""
    while (inner := _inner(node)) is not None:
        node = inner
    return node


def _inner(node: nodes.Node) -> nodes.Node | None:
    if isinstance(node, (nodes.Filter, nodes.Test)):
        return node.node
    if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
        return node.node
    return None


def _is_name(node: nodes.Node, names: set[str]) -> bool:
    return isinstance(node, nodes.Name) and node.ctx == "load" and node.name in names


def _aliases(tree: nodes.Template, name: str) -> set[str]:
    """Return *name* and every variable that is set from it, or from such a variable."""
    names = {name}
    while True:
        found = {
            assignment.target.name
            for assignment in tree.find_all(nodes.Assign)
            if isinstance(assignment.target, nodes.Name) and _is_name(_peel(assignment.node), names)
        }
        if found <= names:
            return names
        names |= found


def _message_names(tree: nodes.Template, aliases: set[str]) -> set[str]:
    return {
        loop.target.name
        for loop in tree.find_all(nodes.For)
        if isinstance(loop.target, nodes.Name) and _is_name(_peel(loop.iter), aliases)
    }


def _is_content_of(node: nodes.Node, messages: set[str]) -> bool:
    node = _peel(node)
    if isinstance(node, nodes.Getitem):
        is_content = isinstance(node.arg, nodes.Const) and node.arg.value == "content"
        return is_content and _is_name(node.node, messages)
    return (
        isinstance(node, nodes.Getattr) and node.attr == "content" and _is_name(node.node, messages)
    )


def _loops_over_content_argument(
    macro: nodes.Macro, tree: nodes.Template, messages: set[str]
) -> bool:
    arguments = set(_content_arguments(macro, tree, messages))
    return any(
        isinstance(loop.iter, nodes.Name) and loop.iter.name in arguments
        for loop in macro.find_all(nodes.For)
    )


def _content_arguments(
    macro: nodes.Macro, tree: nodes.Template, messages: set[str]
) -> Iterator[str]:
    """Return the names of the macro's arguments that get a message's content in some call."""
    names = [argument.name for argument in macro.args]
    for call in tree.find_all(nodes.Call):
        if not isinstance(call.node, nodes.Name) or call.node.name != macro.name:
            continue
        given = [
            *zip(names, call.args, strict=False),
            *((keyword.key, keyword.value) for keyword in call.kwargs),
        ]
        yield from (
            name for name, value in given if name in names and _is_content_of(value, messages)
        )
