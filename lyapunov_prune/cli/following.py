"""The command to give next, which is named at the end of every command that measures or writes."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # a usage error must not wait for numpy
    from lyapunov_prune.results.worth import Ratio

_SCORED = "eval {output} --against {model}"
_PRUNED = "prune {model} --remove 25% --mend -o smaller"
# By command, of which the first is named whose {arguments} were given. `prune` names its own, and so do the answers of
# `profile`, `rank` and `explain`.
_NEXT = {
    "demo": ("explain smollm2-135m runs/demo/small",),
    "shrink": (f"{_SCORED} --speed",),
    "compress": (_SCORED,),
    "joint": (f"{_SCORED} --speed",),
    "export": (_SCORED,),
    "heal": ("eval {output} --against {teacher} --speed", "eval {output} --against smollm2-135m --speed"),
    "eval": ("hierarchy {against} {model}", "shrink {model} -o smaller.gguf"),
    "check": ("explain {model} {compressed}", "eval {model}"),
    "sensitivity": (_PRUNED,),
    "hierarchy": ("eval {compressed} --against {dense}",),
}
# The same where the perplexity was compared and is not good.
_COSTLY = {
    "shrink": ("explain {model} {output}",),
    "joint": ("explain {model} {output}",),
    "heal": ("explain {teacher} {output}", "explain smollm2-135m {output}"),
    "eval": ("explain {against} {model}",),
}


def following(command: str, values: Mapping[str, Any], ratio: Ratio | None) -> str:
    """What to give after `command`, which had these arguments and options; empty if nothing is worth naming.

    `ratio` is the perplexity beside the dense model's, if it was compared.
    """
    given = {name: shlex.quote(str(value)) for name, value in values.items() if value is not None}
    costly = ratio is not None and not ratio.is_good
    for template in (*(_COSTLY.get(command, ()) if costly else ()), *_NEXT.get(command, ())):
        with suppress(KeyError):  # the model to compare with, for one, was not given
            streams = given.get("device") == "disk" and template.startswith(("eval", "explain"))
            return template.format_map(given) + " --device disk" * streams
    return ""
