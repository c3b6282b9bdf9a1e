"""Shardings of a state, from the table of docs/design.md."""

from jax.sharding import Mesh, NamedSharding

from lorajax.errors import SpecError
from lorajax.kernels_pallas import LoraWeights
from lorajax.sharding.rules import WHOLE, AxisRules
from lorajax.spec import LoraSpec
from lorajax.state import LoraState, TargetSlots, abstract_state
from lorajax.target import Target

# Logical axis of d_in in A and of d_out in B; layers, slots and ranks are never cut. A row target
# keeps B whole: its delta joins the partial sum before the base's all-reduce.
_FEATURES = {"column": (WHOLE, "tensor"), "row": ("tensor", WHOLE)}


def state_shardings(spec: LoraSpec, mesh: Mesh, rules: AxisRules | None = None) -> LoraState:
    """The sharding of every array of `init_state(spec)`.

    | parallel | A `[L, S, G, R, d_in]` | B `[L, S, R, d_out]` |
    |---|---|---|
    | column | replicated | d_out over `tensor` |
    | row | d_in over `tensor` | replicated |

    Args:
        spec: The slots.
        mesh: The devices.
        rules: The mesh axis of each logical axis.

    Returns:
        A `LoraState` of `NamedSharding`, for `init_state` and `AdapterManager`.

    Raises:
        SpecError: The mesh lacks an axis, or a feature axis does not divide over it.
    """
    rules = AxisRules() if rules is None else rules
    rules.check(mesh)
    shapes = abstract_state(spec)
    targets = {}
    for target in spec.targets:
        _check_divides(target, mesh, rules)
        d_in, d_out = _FEATURES[target.parallel]
        sharding = LoraWeights(
            A=NamedSharding(mesh, rules.spec(None, None, None, None, d_in)),
            B=NamedSharding(mesh, rules.spec(None, None, None, d_out)),
            scale=NamedSharding(mesh, rules.spec()),
            slices=target.slices,
        )
        parts = shapes[target.name].parts
        targets[target.name] = TargetSlots((sharding,) * len(parts), target.name)
    return LoraState(targets)


def _check_divides(target: Target, mesh: Mesh, rules: AxisRules) -> None:
    shards = 1 if rules.tensor is None else mesh.shape[rules.tensor]
    cut = [target.d_in] if target.parallel == "row" else list(target.slices)
    uneven = [n for n in cut if n % shards]
    if uneven:
        raise SpecError(
            f"features cut over {rules.tensor!r} must divide by its {shards} devices; got {uneven} "
            f"for {target.name!r}; use a smaller tensor axis"
        )
