"""The parts of JAX that this package uses although JAX does not promise to keep them.

Importing this module raises an error if JAX has moved one of these names.
"""

import importlib
import importlib.util
import logging
import sys
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.extend.core import Literal

logger = logging.getLogger("jaxcoded")

_TAKEN = "0.10 to 0.12"  # the versions in pyproject.toml


def _attribute(module: str, name: str) -> Any:
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError):
        raise ImportError(
            f"jaxcoded does not run with JAX {jax.__version__}, which has no {module}.{name}: "
            f"install JAX {_TAKEN}, or a newer jaxcoded"
        ) from None


def _module(name: str, *taken: str) -> Any:
    for each in taken:
        _attribute(name, each)
    return importlib.import_module(name)


# The interface for custom operations. JAX's tutorials use it, but JAX's reference does
# not describe it.
if TYPE_CHECKING:
    from jax import core

    ShapedArray = core.ShapedArray
    Tracer = core.Tracer
else:
    ShapedArray = _attribute("jax.core", "ShapedArray")
    Tracer = _attribute("jax.core", "Tracer")
eval_jaxpr = _attribute("jax.core", "eval_jaxpr")
ad = _module(
    "jax.interpreters.ad",
    *("Zero", "add_tangents", "deflinear2", "instantiate_zeros"),
    "is_undefined_primal",
    *("primitive_jvps", "primitive_transposes"),
)
batching = _module("jax.interpreters.batching", "bdim_at_front", "primitive_batchers")
mlir = _module(
    "jax.interpreters.mlir", "LoweringRuleContext", "lower_fun", "register_lowering"
)
apply_primitive = _attribute("jax.interpreters.xla", "apply_primitive")
_nan_check = _attribute("jax._src.api_util", "maybe_recursive_nan_check")

_trace_ctx = _attribute("jax._src.core", "trace_ctx")
_runtime_tokens = _attribute("jax._src.dispatch", "runtime_tokens")
_Effect = _attribute("jax._src.effects", "Effect")
_NamedAxisEffect = _attribute("jax._src.core", "NamedAxisEffect")
# JAX's sets of effects that it accepts when it lowers programs, in ordered programs, in
# loops and branches, and in functions with custom derivatives.
_taken_effects = [
    _attribute("jax._src.effects", name)
    for name in (
        "lowerable_effects",
        "ordered_effects",
        "control_flow_allowed_effects",
        "custom_derivatives_allowed_effects",
    )
]
# The effects of operations whose results `jax.checkpoint` always keeps.
kept_effects = _attribute("jax._src.effects", "remat_allowed_effects")
pe = _module(
    "jax.interpreters.partial_eval",
    *("custom_partial_eval_rules", "dce_rules", "partial_eval_jaxpr_custom_rules"),
)
_emit_python_callback = _attribute("jax.interpreters.mlir", "emit_python_callback")
_TokenSet = _attribute("jax.interpreters.mlir", "TokenSet")

_pcast = _attribute("jax.lax", "pcast")

# Whether JAX has started. From then on it has a device, threads and memory.
started = _attribute("jax._src.xla_bridge", "backends_are_initialized")
_backend_factories = _attribute("jax._src.xla_bridge", "_backend_factories")
_find_plugins = _attribute("jax._src.xla_bridge", "_discover_and_register_pjrt_plugins")

# The type of an effect's value in compiled programs.
_TOKEN = _attribute("jax._src.core", "abstract_token")


def default_backend() -> str:
    """Return ``jax.default_backend()``. Do not start JAX if the backend can only be the
    CPU, because JAX_PLATFORMS says so or no other backend is installed.
    """
    if started():
        return jax.default_backend()
    config: Any = jax.config
    if platforms := config.jax_platforms:
        only_cpu = platforms.split(",")[0] == "cpu"
    else:
        _find_plugins()
        others = set(_backend_factories) - {"cpu", "tpu"}
        only_cpu = not others and importlib.util.find_spec("libtpu") is None
    return "cpu" if only_cpu else jax.default_backend()


def tracing() -> bool:
    """Return whether JAX is tracing this code, as inside ``jit``."""
    return not _trace_ctx.is_top_level()


def ordered_effect(name: str) -> type:
    """Return a new class of effects; operations with such an effect keep their order."""
    effect = type(name, (_Effect,), {"__hash__": lambda self: hash(name)})
    for where in _taken_effects:
        where.add_type(effect)
    return effect


def runs_again() -> bool:
    """Return whether JAX is now repeating a compiled function without ``jit``. It does
    so when ``jax_debug_nans`` or ``jax_debug_infs`` has found a NaN or an infinity.
    """
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code is _nan_check.__code__:
            return True
    return False


def check_not_again(call: Any) -> None:
    """Raise a FloatingPointError if JAX repeats (`runs_again`) a ``call`` in which
    other ranks take part, because they do not repeat it. ``call`` is ``None`` for an
    operation without other ranks. JAX passes the error to the caller of the compiled
    function.
    """
    if call is not None and runs_again():
        raise FloatingPointError(
            "jax_debug_nans or jax_debug_infs has found NaN or infinities in the results of a compiled function, and "
            f"JAX repeats it to locate them. Rounds cannot be repeated: this rank stops before it repeats {call}. "
            "Values before that call are finite. Either its result is not finite, since some rank contributes such "
            "numbers, or values computed from its result are not. Check both on all ranks with jnp.isfinite"
        )


def compile_alone(primitive: Any, call: Callable[..., Any]) -> None:
    """Make JAX compile an operation as a separate program if it is called outside of
    compiled programs. The operation raises an error if JAX repeats it (`runs_again`). ``call``
    converts the operation's parameters to the argument of `check_not_again`.
    """

    def run(*operands: Any, **params: Any) -> Any:
        check_not_again(call(**params))
        return apply_primitive(primitive, *operands, **params)

    primitive.def_impl(run)


def program_of(ctx: Any) -> Any:
    """Return the object that all operations of a program share while JAX lowers the
    program."""
    return ctx.module_context.keepalives


def never_drop(primitive: Any) -> None:
    """Make an operation run whether or not its result is used."""

    def keep(used: list[bool], *rest: Any) -> tuple[list[bool], Any]:
        eqn = rest[-1]  # newer versions of JAX pass the operands in between
        return [True] * len(eqn.invars), eqn

    pe.dce_rules[primitive] = keep


def keep_results(primitive: Any, *, known_by_first: bool = False) -> None:
    """Make ``jax.checkpoint`` keep an operation's results under every policy, so that
    the operation is never repeated.

    ``known_by_first`` is for an operation of two operands whose result equals its first
    operand. When JAX separates known values from derivatives that it computes later,
    the result is known if the first operand is known.
    """

    def equation(
        _: Any, later: Sequence[bool], instantiated: Sequence[bool], eqn: Any
    ) -> Any:
        if known_by_first and list(later) == [False, True]:
            first = eqn.invars[0]
            eqn = eqn.replace(
                invars=[first, Literal(first.aval.dtype.type(0), first.aval)]
            )
            later = False, False
        out = [any(later)] * len(eqn.outvars)
        if not any(later):
            return eqn, None, out, out, []
        kept = [
            x
            for x, t in zip(eqn.invars, instantiated)
            if not (t or isinstance(x, Literal))
        ]
        return None, eqn, out, out, kept

    def call(trace: Any, first: Any, second: Any) -> Any:
        if first.is_known() and not second.is_known():
            return first
        return trace.default_process_primitive(primitive, (first, second), {})

    pe.partial_eval_jaxpr_custom_rules[primitive] = equation
    if known_by_first:
        pe.custom_partial_eval_rules[primitive] = call


def effects_barrier(reported: Collection[str] = ()) -> None:
    """Call ``jax.effects_barrier``, and drop its errors. Each error is logged once as a
    warning, unless its text is in ``reported``.
    """
    failed = []
    for token in (
        *_runtime_tokens.current_tokens.values(),
        *_runtime_tokens.output_runtime_tokens.values(),
    ):
        try:
            token.block_until_ready()
        except Exception as error:  # noqa: BLE001  # any error of the program
            failed.append(str(error))
    _runtime_tokens.clear()
    for text in dict.fromkeys(failed):
        # Compare texts without their status, such as INTERNAL: a later computation may have reported the same error
        # with a different status.
        message = text.partition(": ")[2] or text
        if not any(message in other for other in reported):
            logger.warning("a round had failed: %s", text)


def varying(x: Any) -> tuple[str, ...]:
    """Return the axes of a manual mesh along which a value may differ, if JAX knows
    them."""
    described = isinstance(x, jax.ShapeDtypeStruct | ShapedArray)
    aval = x if described else jax.typeof(x)
    kind = getattr(aval, "manual_axis_type", None)
    return () if kind is None else tuple(sorted(kind.varying))


def axes_of_vmap(closed: Any) -> list[str]:
    """Return the named axes that a traced function uses, except the axes of a manual mesh."""
    used = {
        effect.name for effect in closed.effects if isinstance(effect, _NamedAxisEffect)
    }
    return sorted(
        map(str, used.difference(jax.sharding.get_abstract_mesh().manual_axes))
    )


def coarsest_eps(function: Any, *operands: Any) -> float:
    """Return the largest machine epsilon of all floating-point numbers that a function
    of pytrees computes, or 0 if it computes none. This traces the function and the
    functions that it calls.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxcoded import _jax_compat
        >>> narrow = lambda x: jnp.sum(x.astype(jnp.bfloat16)).astype(x.dtype)
        >>> _jax_compat.coarsest_eps(narrow, jnp.ones(3))  # 2⁻⁷
        0.0078125
    """
    coarsest = 0.0
    left = [jax.make_jaxpr(function)(*operands).jaxpr]
    while left:
        for equation in left.pop().eqns:
            for out in equation.outvars:
                dtype = getattr(out.aval, "dtype", None)
                if dtype is not None and jnp.issubdtype(dtype, jnp.floating):
                    coarsest = max(coarsest, float(jnp.finfo(dtype).eps))
            for inner in jax.tree.leaves(list(equation.params.values())):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    left.append(inner)
    return coarsest


def like(x: Any, shape: tuple[int, ...], dtype: Any = None) -> ShapedArray:
    """Return the type of an array with this shape whose values may differ along the same
    mesh axes as the values of ``x``. Its dtype is ``dtype``, by default the dtype of ``x``."""
    aval = x if isinstance(x, ShapedArray) else jax.typeof(x)
    if varying(aval):
        return aval.update(shape=shape, dtype=dtype, weak_type=False)
    return ShapedArray(shape, aval.dtype if dtype is None else dtype)


def vary(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Mark a value that is equal on all devices as a value that may differ along these
    axes of the mesh."""
    return _pcast(x, axes, to="varying") if axes else x


def devices(context: Any) -> int:
    """Return a program's number of devices."""
    axes = context.module_context.axis_context
    # The context of `jit` has the number of devices; the contexts of `shard_map` and
    # `pmap` have a mesh.
    return axes.num_devices if hasattr(axes, "num_devices") else axes.mesh.size


def lower_in_order(context: Any, effect: Any, lower: Any, operands: Any) -> Any:
    """Lower an operation whose first operand and first result are the value of an
    effect. Call ``lower`` with a context and operands that begin with this value.
    Return its results without the value."""
    inner = context.replace(
        avals_in=[_TOKEN, *context.avals_in], avals_out=[_TOKEN, *context.avals_out]
    )
    token, *out = lower(inner, context.tokens_in.get(effect), *operands)
    context.set_tokens_out(_TokenSet({effect: token}))
    return out


def lower_python_in_order(
    context: Any, effect: Any, function: Any, operands: Any
) -> Any:
    """Lower an operation that calls Python, in order with other operations of this
    effect."""
    out, token, _ = _emit_python_callback(
        context,
        function,
        context.tokens_in.get(effect),
        operands,
        context.avals_in,
        context.avals_out,
        has_side_effect=True,
    )
    context.set_tokens_out(_TokenSet({effect: token}))
    return out
