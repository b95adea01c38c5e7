"""A regular expression from a file that anyone may have written: whether matching a short name is sure to end soon.

Python tries one way after another, and there may be more of them than anyone can wait for. That needs a repeated group
with a choice or a repetition inside, or many repetitions in a row.
"""

import re

_MOST_REPEATS, _MOST_CHOICES = 8, 40
_TOKEN = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|[()|*+]|\{\d*,?\d*\}|.", re.DOTALL)


def problem(expression: str) -> str | None:
    """Finds what is wrong with an expression.

    >>> problem(r".*\\.layers\\.\\d+\\.(q|v)_proj"), problem("(a+)+b")
    (None, 'may take too long: a repeated group has a choice or a repetition inside')
    """
    try:
        re.compile(expression)
    except (re.error, RecursionError, OverflowError) as error:
        return f"is no regular expression: {error}"
    # Of each open group; of the group that was closed last.
    has_choice, closed, repeats, choices, before = [False], False, 0, 0, ""
    for token in _TOKEN.findall(expression):
        if token == "(":
            has_choice.append(False)
        elif token in ("*", "+") or len(token) > 2 and token[0] == "{":
            if closed:
                return "may take too long: a repeated group has a choice or a repetition inside"
            has_choice[-1], repeats = True, repeats + 1
        elif token == "|":
            has_choice[-1], choices = True, choices + 1
        elif token == "?" and before not in ("(", "*", "+", "?") and before[-1:] != "}":
            has_choice[-1], repeats = True, repeats + 1
        inside = token == ")" and len(has_choice) > 1 and has_choice.pop()
        has_choice[-1] |= inside
        closed, before = inside, token
    is_long = repeats > _MOST_REPEATS or choices > _MOST_CHOICES
    return f"may take too long: it has {repeats} repetitions and {choices} choices" if is_long else None
