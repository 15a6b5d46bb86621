"""The states of a pass through the model, and the transitions between them."""

from __future__ import annotations

from enum import Enum, auto


class PassState(Enum):
    """The activity of the model. A recomputation inside of a backward is part of that backward.

    Resident groups are on the device in every state. Each state names the other groups that are there.
    """

    IDLE = auto()
    """No module of the model runs, and no backward. On the device: prefetched groups."""
    FORWARD = auto()
    """A module runs. On the device: the groups of running modules, and prefetched groups."""
    BACKWARD = auto()
    """Autograd runs, and no parameter has received a gradient (torch.autograd.grad accumulates none). On the device:
    the group that backward is in, the groups that enclose it, recomputed groups, and prefetched groups."""
    ACCUMULATING = auto()
    """As BACKWARD, and gradients of parameters arrive. On the device also: gradients until they have left it."""
    STEPPING = auto()
    """As ACCUMULATING, and each group is updated as soon as its gradients are final (tiering.step_in_backward)."""
    CLOSED = auto()
    """The engine is closed. No pass may begin."""

    @property
    def in_backward(self) -> bool:
        """Whether a backward has begun and has not ended."""
        return self in (PassState.BACKWARD, PassState.ACCUMULATING, PassState.STEPPING)


class CurrentPass:
    """The ``state`` and its transitions. Each transition names the states that it may leave."""

    def __init__(self) -> None:
        self.state = PassState.IDLE

    def to_forward(self) -> None:
        """The outermost module is called; or the backward that ran inside of a module has ended."""
        self._leave(PassState.IDLE, PassState.BACKWARD, PassState.ACCUMULATING, PassState.STEPPING)
        self.state = PassState.FORWARD

    def to_backward(self) -> None:
        """A gradient has reached an output of the model."""
        self._leave(PassState.IDLE, PassState.FORWARD)
        self.state = PassState.BACKWARD

    def to_accumulating(self) -> None:
        """A parameter receives a gradient, the first one of this backward."""
        self._leave(PassState.BACKWARD)
        self.state = PassState.ACCUMULATING

    def to_stepping(self) -> None:
        """This backward is the one that updates parameters."""
        self._leave(PassState.ACCUMULATING)
        self.state = PassState.STEPPING

    def to_idle(self) -> None:
        """The pass has ended, or an exception has ended it."""
        self._leave(*(state for state in PassState if state is not PassState.CLOSED))
        self.state = PassState.IDLE

    def to_closed(self) -> None:
        """The engine ends."""
        self._leave(PassState.IDLE)
        self.state = PassState.CLOSED

    def _leave(self, *states: PassState) -> None:
        assert self.state in states, f"a pass in state {self.state.name} cannot make this transition"
