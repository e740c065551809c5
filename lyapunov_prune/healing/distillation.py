"""Distillation: train a student to predict what its teacher predicts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial

import torch
from accelerate import PartialState
from accelerate.utils import reduce
from torch import nn
from transformers import PreTrainedModel

from lyapunov_prune.arguments import Positive, checked
from lyapunov_prune.errors import Diverged, LyapunovPruneError
from lyapunov_prune.forward.hooks import final_state
from lyapunov_prune.forward.logits import uncached_logits
from lyapunov_prune.forward.scoring import Scorer, is_large
from lyapunov_prune.healing.sharded import are_sharded, gathered, in_parts_like
from lyapunov_prune.linalg import widen
from lyapunov_prune.models.decoder import Decoder
from lyapunov_prune.models.device import free_memory
from lyapunov_prune.models.structure import find_structure

CLIP = 1.0  # the largest norm of a step's gradient
CLOSE = 0.02  # largest relative change of a loss by products in bfloat16
_TOKENS = 64  # tokens whose distributions are in memory at a time
KEPT = 0.1  # largest share of the machine's free memory for the teacher's states
# AdamW without weight decay, because the target is the teacher, not small weights. Plain SGD.
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": partial(torch.optim.AdamW, weight_decay=0.0, fused=True),
    "sgd": torch.optim.SGD,
}


@checked
@torch.no_grad()
def distillation_loss(
    student: torch.Tensor, teacher: torch.Tensor, temperature: Positive = 1.0, *, of: int | None = None
) -> tuple[float, torch.Tensor]:
    """`T²/N Σ_t KL(p_t ‖ q_t)` in nats, and its gradient with respect to the student's logits, `T/N (q − p)`.

    `p = softmax(z/T)` of the teacher, `q` of the student; the factor T² keeps the size of the gradient when T changes
    (Hinton, Vinyals and Dean, arXiv:1503.02531, §2.1). Logits are tokens × vocabulary (N × V) and finite. The gradient
    has the student's shape, dtype and device; **it overwrites `teacher`**, so that no third tensor of this size is
    allocated. Distributions are in float32 or wider, the sum in float64. With `of`, N is the number of tokens of which
    these are a part, and the losses of the parts add up.

    Raises LyapunovPruneError for different shapes and for a temperature that is not positive.
    """
    if student.shape != teacher.shape or student.ndim != 2:
        raise LyapunovPruneError(
            f"logits of shape {tuple(student.shape)} against {tuple(teacher.shape)}; give two tokens × vocabulary"
        )
    gradient, count = teacher.to(student.device, student.dtype), of or len(student)
    total = torch.zeros((), dtype=torch.float64)
    for z, out in zip(student.split(_TOKENS), gradient.split(_TOKENS), strict=True):
        log_q = widen(z).div(temperature).log_softmax(-1)
        log_p = widen(out).div(temperature).log_softmax(-1)
        p = log_p.exp()
        total += (p * (log_p - log_q)).sum(-1).cpu().double().sum()
        out.copy_((log_q.exp() - p) * (temperature / count))
    return float(total) * temperature**2 / count, gradient


class Distillation:
    """Training of `parameters` of `model`, one step at a time, each on some windows of tokens or some images.

    The optimizer is one of OPTIMIZERS, and gradients are clipped to norm 1. The caller gives the learning rate of every
    step; a parameter uses that rate times its entry in `sizes` (default 1). `tensors` is the complete state. Put both
    models in eval mode, or dropout is active. With `processes` each process takes its share of the items of a step, one
    by one, and all end the step with the same parameters; sharded models end with their shards of the same, and take
    equal numbers of items in each process.

    If `narrow`, the forwards of both models multiply in bfloat16 (autocast), and what they return may be in it;
    weights, gradients, optimizer and all that depends on them stay in the dtype of the parameters.

    The teacher's final states (tokens × width) of a window are kept for when it comes again, until they take a tenth of
    the machine's free memory; the logits are formed from them as the first time, to the same bits. Not of images, nor
    with sharded layers: the processes gather a layer together, so no one of them can pass over it.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        teacher: PreTrainedModel,
        parameters: dict[str, nn.Parameter],
        temperature: float,
        optimizer: str = "adamw",
        processes: PartialState | None = None,
        sizes: Mapping[str, float] | None = None,
        narrow: bool = False,
    ) -> None:
        self.model, self.teacher, self.parameters = model, teacher, parameters
        self.temperature, self.narrow = temperature, narrow
        self.change: float | None = None  # of the loss by products in bfloat16, if that was tried
        self.losses: list[float] = []  # before each step
        self._processes, self._sharded = processes, are_sharded(parameters)
        self._pair: tuple[Scorer, Scorer] | None = None
        self._states: dict[tuple[bool, torch.Size, bytes], torch.Tensor] = {}  # of the teacher: narrow, token ids
        self._room = KEPT * free_memory("cpu") / (processes.num_processes if processes else 1)
        self._kind = OPTIMIZERS[optimizer]
        by_size: dict[float, list[nn.Parameter]] = {}
        for name, parameter in parameters.items():
            by_size.setdefault(1.0 if sizes is None else sizes[name], []).append(parameter)
        self._groups = list(by_size.items())
        self.begin_anew()

    @property
    def step(self) -> int:
        """Number of steps taken."""
        return len(self.losses)

    def begin_anew(self, weights: Mapping[str, torch.Tensor] | None = None) -> None:
        """Reset the optimizer, and set the parameters to `weights` if given."""
        self._optimizer = self._kind([{"params": some, "lr": 0.0, "size": size} for size, some in self._groups])
        for name, value in (weights or {}).items():
            self.put(name, value)

    @torch.no_grad()
    def put(self, name: str, value: torch.Tensor) -> None:
        """Set a parameter to `value`, given whole or sharded like it."""
        parameter = self.parameters[name]
        parameter.copy_(in_parts_like(value, parameter))

    @torch.no_grad()
    def copies(self) -> dict[str, torch.Tensor]:
        """Copies of the current parameters, sharded if they are."""
        return {name: parameter.detach().clone() for name, parameter in self.parameters.items()}

    def multiplying(self) -> torch.autocast:
        """Forwards within the block multiply in bfloat16 if `narrow`."""
        # Without cache: it would keep every weight twice, and what is cast without gradient would serve with it.
        return torch.autocast(self.model.device.type, torch.bfloat16, enabled=self.narrow, cache_enabled=False)

    @torch.no_grad()
    def narrow_if_close(self, inputs: torch.Tensor) -> None:
        """Become `narrow` if that makes a relative `change` of at most CLOSE to the loss of these `inputs`.

        The change is infinite if the models do not run so, or predict the same.
        """
        losses = []
        for self.narrow in (True, False):
            try:
                losses.append(self._learn(inputs, 1))
            except RuntimeError:  # code that takes a dtype for granted
                if not self.narrow:
                    raise
                losses.append(math.inf)
        narrow, wide = losses
        self.change = abs(narrow / wide - 1) if wide > 0 else math.inf
        self.narrow = self.change <= CLOSE

    @torch.enable_grad()
    def take_step(self, inputs: torch.Tensor, rate: float) -> None:
        """One step at this learning rate on token ids (windows × tokens) or images (n × channels × height × width).

        Every predicted token or image has the same weight. Raises Diverged for a loss or gradient that is not finite.
        """
        self._optimizer.zero_grad()
        shared = self._processes
        parts = inputs.split(1) if shared else (inputs,)
        mine = parts[shared.process_index :: shared.num_processes] if shared else parts
        items = len(mine if self._sharded else parts)  # gradients of sharded layers are averaged, not added
        loss = 0.0
        for part in mine:
            loss += self._learn(part, items)
        if shared and shared.num_processes > 1:
            loss = self._together(loss, shared.device)
        norm = gathered(nn.utils.clip_grad_norm_(self.parameters.values(), CLIP))
        if not (math.isfinite(loss) and norm.isfinite()):
            raise Diverged(
                f"the {'gradient' if math.isfinite(loss) else 'loss'} of step {self.step} is not finite; "
                + ("lower the learning rate" if self.step else "check the weights of both models")
            )
        for group in self._optimizer.param_groups:
            group["lr"] = rate * group["size"]
        self._optimizer.step()
        self.losses.append(loss)

    def _learn(self, part: torch.Tensor, items: int) -> float:
        """Loss of one of `items` parts; adds its gradient."""
        if not (part.is_floating_point() or self._sharded):
            student, teacher = self._scorers(part)
            if student.enters and teacher.enters:
                return self._learn_by_states(student, teacher, part, items)
        with torch.no_grad(), self.multiplying():
            target = uncached_logits(self.teacher, part.to(self.teacher.device)).flatten(0, -2)
        with self.multiplying():
            logits = uncached_logits(self.model, part.to(self.model.device)).flatten(0, -2)
        return self._backward(logits, target, len(logits) * items)

    def _learn_by_states(self, student: Scorer, teacher: Scorer, part: torch.Tensor, items: int) -> float:
        """The same from final states; if the logits are many, those of one block of positions at a time."""
        known = self._taught(teacher, part)
        with self.multiplying():
            state = final_state(student.structure, part).flatten(0, 1)
        ends, loss = state.detach().requires_grad_(), 0.0
        for rows, taught in student.split(ends, known) if is_large(self.model, part) else [(ends, known)]:
            with torch.no_grad(), self.multiplying():
                target = teacher.own(taught)
            with self.multiplying():
                logits = student.own(rows)
            loss += self._backward(logits, target, len(ends) * items)
        if torch.is_grad_enabled():
            state.backward(ends.grad)
        return loss

    @torch.no_grad()
    def _taught(self, teacher: Scorer, part: torch.Tensor) -> torch.Tensor:
        """The teacher's final states of all tokens, from memory if these windows came before."""
        key = self.narrow, part.shape, part.cpu().numpy().tobytes()
        if key in self._states:
            return self._states[key].to(self.teacher.device)
        with self.multiplying():
            states = final_state(teacher.structure, part).flatten(0, 1)
        if states.nbytes <= self._room:
            self._room -= states.nbytes
            self._states[key] = states.cpu()
        return states

    @torch.no_grad()
    def _scorers(self, part: torch.Tensor) -> tuple[Scorer, Scorer]:
        """Scorers of the student and of the teacher, checked once."""
        if self._pair is None:
            student, teacher = (
                Scorer(Decoder(m, find_structure(m)), part.to(m.device)) for m in (self.model, self.teacher)
            )
            self._pair = student, teacher
        return self._pair

    def _backward(self, logits: torch.Tensor, target: torch.Tensor, count: int) -> float:
        """Loss of these logits, (tokens × vocabulary) out of `count`, and its backward pass where gradients are on."""
        loss, gradient = distillation_loss(logits, target, self.temperature, of=count)
        if torch.is_grad_enabled():
            logits.backward(gradient)
        return loss

    def _together(self, loss: float, device: torch.device) -> float:
        """Loss of the whole step; sums the gradients of all processes for parameters that are not sharded."""
        if self._sharded:
            return float(reduce(torch.tensor(loss, dtype=torch.float64, device=device), "mean"))
        given = list(self.parameters.values())
        told = [loss, *(p.grad is not None for p in given)]
        loss, *held = reduce(torch.tensor(told, dtype=torch.float64, device=device), "sum").tolist()
        for parameter, known in zip(given, held, strict=True):
            if known:  # an unused expert has no gradient in any process
                gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                parameter.grad = reduce(gradient, "sum")
        return loss

    def tensors(self) -> dict[str, torch.Tensor]:
        """The losses, the parameters, and the optimizer state of each, by `kind/name`.

        Shards are gathered: all processes must call this together, and only the main one receives the result.
        """
        tensors = {"losses": torch.tensor(self.losses, dtype=torch.float64)}
        given = not self._sharded or (self._processes is not None and self._processes.is_main_process)
        for name, parameter in self.parameters.items():
            for kind, value in {"parameter": parameter, **self._optimizer.state.get(parameter, {})}.items():
                whole = gathered(value)
                if given:
                    tensors[f"{kind}/{name}"] = whole
        return tensors

    @torch.no_grad()
    def go_on_from(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Resume from these `tensors`, by name; each is needed whole only while it is copied."""
        for key, value in tensors:
            kind, _, name = key.partition("/")
            if kind == "losses":
                self.losses = value.tolist()
            elif kind == "parameter":
                self.put(name, value)
            else:
                parameter = self.parameters[name]
                self._optimizer.state[parameter][kind] = in_parts_like(value, parameter)


@torch.no_grad()
def update_sizes(model: PreTrainedModel, parameters: Mapping[str, nn.Parameter]) -> dict[str, float]:
    """Step size of each of the `parameters` (of `trained`) at a learning rate of 1, so that rates are relative.

    `rms(W)` for a parameter of the layers; if it is zero, the smallest of the others. For the factors of
    `low_rank_updates`, `1/√n` for A and `rms(W) √(n/rank)` for B, so that a step of B at rate r changes `W + B A` by
    about r · rms(W).
    """
    known = dict(model.named_parameters(remove_duplicate=False))
    sizes: dict[str, float] = {}
    for name, parameter in parameters.items():
        module, _, side = name.rpartition(".")
        if side == "B" and f"{module}.A" in parameters:
            rank, n = parameters[f"{module}.A"].shape[-2:]
            # For experts stored as one parameter, `module` already names that parameter.
            weight = known[module] if module in known else known[f"{module}.weight"]
            sizes[name] = rms(weight) * (n / rank) ** 0.5
        else:
            sizes[name] = rms(parameter)
    least = min((size for size in sizes.values() if size > 0), default=1.0)
    return {name: size or least for name, size in sizes.items()}


def rms(W: torch.Tensor) -> float:
    """`√mean(W²)`."""
    return float(gathered(torch.linalg.vector_norm(W.detach().float()))) / W.numel() ** 0.5
