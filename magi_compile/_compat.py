"""All use of private PyTorch names: one function per need."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

#: The block size of a BlockMask that stands for "no block list".
LARGE_SPARSE_BLOCK_SIZE = 1 << 30


def is_fake(tensor: Tensor) -> bool:
    """Whether `tensor` is a FakeTensor: it has a shape but no values."""
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(tensor, FakeTensor)


def is_traced(tensor: Tensor) -> bool:
    """Whether what is done with `tensor` becomes a graph (of make_fx), so that nothing may depend on its values."""
    proxy = torch._C._TorchDispatchModeKey.PROXY  # type: ignore[attr-defined]
    return is_fake(tensor) or torch._C._get_dispatch_mode(proxy) is not None


def version_of(tensor: Tensor) -> int:
    """How often `tensor` has been written to; 0 for tensors of `torch.inference_mode`, which do not count it."""
    return 0 if tensor.is_inference() else tensor._version


def may_change_uncounted(tensor: Tensor) -> bool:
    """Whether PyTorch itself writes to `tensor` without counting it: one of inference mode, or an output of Inductor's CUDA
    graphs, which is the same object in every replay."""
    return tensor.is_inference() or torch._C._is_cached_tensor(tensor)  # type: ignore[attr-defined]


def fake_mode_of(tensor: Tensor) -> Any:
    """The FakeTensorMode that `tensor` belongs to, as a context manager."""
    return tensor.fake_mode  # type: ignore[attr-defined]


def copy_of_dynamo_graph(gm: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """A graph that Dynamo gave to a backend, for changes that Dynamo must not see: with all that AOTAutograd reads of it."""
    graph = torch.fx.Graph()
    copies: dict[torch.fx.Node, torch.fx.Node] = {}
    output = graph.graph_copy(gm.graph, copies, return_output_node=True)
    graph.output(output[0])  # type: ignore[index]
    for node, copied in copies.items():
        if hasattr(node, "_dynamo_source"):
            copied._dynamo_source = node._dynamo_source  # type: ignore[attr-defined]
    copied_gm = torch.fx.GraphModule(gm, graph)
    for name, value in vars(gm).items():
        vars(copied_gm).setdefault(name, value)
    copied_gm.meta = dict(gm.meta)
    return copied_gm


def mark_as_without_source(placeholder: torch.fx.Node) -> None:
    """Says that an input of a Dynamo graph is nothing that Dynamo gave it."""
    placeholder._dynamo_source = None  # type: ignore[attr-defined]


def static_fake_mode() -> Any:
    """A FakeTensorMode without dynamic sizes, as a context manager."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


def without_symbols(value: Any, mode: Any) -> Any:
    """A tensor or int of a graph that is being compiled as one that `mode` knows, of the sizes that are at hand."""
    if isinstance(value, torch.SymInt):
        return 8 if value.node.hint is None else int(value.node.hint)
    if not isinstance(value, Tensor):
        return value
    sizes, strides = ([without_symbols(x, mode) for x in f()] for f in (value.size, value.stride))
    with mode:
        return torch.empty_strided(sizes, strides, dtype=value.dtype, device=value.device)


def symbolic_fake_mode() -> Any:
    """A FakeTensorMode in which ints may stay unknown, as a context manager; nothing may ask for a tensor's values."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    sizes = ShapeEnv(allow_scalar_outputs=False, allow_dynamic_output_shape_ops=False)
    return FakeTensorMode(shape_env=sizes, allow_non_fake_inputs=True)


def symbolic_int(mode: Any, name: str) -> Any:
    """An unknown int of a `symbolic_fake_mode`; it is thought to be 8 where that matters."""
    from torch._dynamo.source import ConstantSource

    source = ConstantSource(name)
    symbol = mode.shape_env.create_unspecified_symbol(8, source)
    return mode.shape_env.create_symintnode(symbol, hint=8, source=source)


def traced_to_aten(
    function: Callable[..., Any], arguments: Sequence[Any], mode: Any, *, decompose: bool = False
) -> torch.fx.GraphModule:
    """The operations of ATen that `function` does with `arguments` of a `symbolic_fake_mode`, or those that they consist of; also
    where a graph is being compiled."""
    from torch._decomp import core_aten_decompositions
    from torch._guards import tracing
    from torch.fx.experimental.proxy_tensor import make_fx

    table: Any = core_aten_decompositions() if decompose else None
    with tracing(None), torch.inference_mode(False), torch.no_grad(), mode:
        return make_fx(function, decomposition_table=table)(*arguments)


def without_fake_tensors() -> Any:
    """A context in which new tensors are real, also where a graph is compiled."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    return unset_fake_temporarily()


def scalar_indexing() -> Any:
    """The mode in which FlexAttention calls a mask_mod under torch.vmap: tensors may be indexed with scalars."""
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

    return TransformGetItemToIndex()


@contextmanager
def vmap_in_ops() -> Iterator[None]:
    """torch.vmap as in a program, also inside the implementation of an op, where the dispatcher may have put it aside. It
    raises where an operation has no rule for it, instead of a loop over all elements."""
    from torch._C import DispatchKey, _ForceDispatchKeyGuard

    functorch: Any = torch._C._functorch
    include = torch._C._dispatch_tls_local_include_set()
    exclude = torch._C._dispatch_tls_local_exclude_set()
    for name in _KEYS_OF_VMAP:
        exclude = exclude.remove(getattr(DispatchKey, name))
    has_fallback = functorch._is_vmap_fallback_enabled()
    functorch._set_vmap_fallback_enabled(False)
    try:
        with _ForceDispatchKeyGuard(include, exclude):
            yield
    finally:
        functorch._set_vmap_fallback_enabled(has_fallback)


_KEYS_OF_VMAP = (
    *("FuncTorchDynamicLayerFrontMode", "FuncTorchDynamicLayerBackMode"),
    *("FuncTorchBatched", "FuncTorchVmapMode", "FuncTorchBatchedDecomposition"),
)


def graph_of(
    function: Any, tensors: Sequence[Tensor], num_ints: int, indices: tuple[int, torch.device]
) -> torch.fx.GraphModule:
    """The graph of PyTorch's operators that a function calls, for any values: of `indices[0]` int64 tensors without dimensions on
    the device `indices[1]`, of tensors like `tensors`, and of `num_ints` ints."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    with without_fake_tensors():
        environment = ShapeEnv()
        mode = FakeTensorMode(shape_env=environment, allow_non_fake_inputs=True)
        with mode:
            points = [
                torch.empty((), dtype=torch.int64, device=indices[1]) for _ in range(indices[0])
            ]
            like = [
                torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
                for x in tensors
            ]
            ints = [environment.create_unbacked_symint() for _ in range(num_ints)]
        environment.pending_fresh_unbacked_symbols.clear()
        return make_fx(function, tracing_mode="fake")(*points, *like, *ints)


def source_name(placeholder: torch.fx.Node) -> str:
    """How the user's program calls the value of a placeholder of a Dynamo graph, or the placeholder's own name."""
    source = getattr(placeholder, "_dynamo_source", None)
    if source is None:
        return placeholder.name
    name = source.name() if callable(source.name) else source.name  # a property since torch 2.12
    captured = re.fullmatch(r"(.*)\.__closure__\[(\d+)\]\.cell_contents", name)
    if captured is not None:
        function = _value_of_source(captured[1])
        if isinstance(function, FunctionType):
            return function.__code__.co_freevars[int(captured[2])]
    name = re.sub(r"\b[LG]\['(\w+)'\]", r"\1", name)
    name = re.sub(r"\b__import_\w+\.", "", name)  # a global of another module
    return re.sub(r"^___from_numpy\((.*)\)$", r"\1", name)


def example_of_input(placeholder: torch.fx.Node) -> Tensor | None:
    """The tensor that Dynamo was called with for a placeholder of its graph, while it compiles; None for other inputs, and where it
    traces tensors that have no values."""
    example = getattr(placeholder.meta.get("grapharg"), "example", None)
    return example if isinstance(example, Tensor) and not is_fake(example) else None


#: What PyTorch calls the permutation of a load balancer, through which a mask_mod of its context parallelism looks up tokens.
PERMUTED_TOKENS = "qkv_rearrange_indices"


def _value_of_source(name: str) -> Any:
    """What Dynamo calls `name`, as in the guards of the frame that it compiles now; None where that cannot be known."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        frame = InstructionTranslator.current_tx().output.root_tx
        return eval(name, {"L": frame.f_locals, "G": frame.f_globals})
    except Exception:  # outside of Dynamo, or of a source that only guards know
        return None


#: Where the captured tensor and its indices begin among the arguments of an exported look-up.
EXPORTED_LOOKUP_ARGUMENTS = 3


def is_exported_lookup(node: torch.fx.Node) -> bool:
    """Whether `node` of a mask_mod is how torch.export writes `captured[index]`: the call of an autograd function, with
    the function's and the arguments' layout and its name in front."""
    name = node.args[2] if len(node.args) > EXPORTED_LOOKUP_ARGUMENTS else None
    is_call = getattr(node.target, "__name__", "") == "flat_apply"
    return is_call and isinstance(name, str) and name.endswith("_higher_order_op.ModIndex")


def watch_flex_attention(
    allows_cpu_training: Callable[[Any], bool], notice_eager: Callable[[], None]
) -> None:
    """Has PyTorch's FlexAttention ask us, from now on, in two places; everything else stays as it is.

    Args:
        allows_cpu_training: whether CPU tensors that need gradients are welcome, asked while Dynamo traces for a
            backend, which is the argument, or while torch.export runs the model (None).
        notice_eager: called before attention is computed eagerly: by FlexAttention itself, or where a graph broke at
            its operator. Not where a graph that a compiler was given runs it.
    """
    from torch.nn.attention import flex_attention as flex

    if getattr(flex._validate_device, "is_ours", False):
        return
    validate_device = flex._validate_device
    notice = torch.compiler.disable(notice_eager)

    @torch._dynamo.assume_constant_result
    def is_welcome() -> bool:
        return allows_cpu_training(backend_that_dynamo_traces_for())

    def validate(query: Tensor, key: Tensor, value: Tensor) -> None:
        if not torch.compiler.is_compiling():
            notice()
        elif query.device.type == "cpu" and is_welcome():
            return
        validate_device(query, key, value)

    # Dynamo still reads it as a part of its callers, but does not compile it by itself: then it would not notice.
    torch._dynamo.eval_frame.skip_code(validate.__code__)
    validate.is_ours = True  # type: ignore[attr-defined]
    flex._validate_device = validate

    operator = torch.ops.higher_order.flex_attention
    kernels = operator.py_kernels
    dense = kernels[torch._C.DispatchKey.CompositeExplicitAutograd]

    def attention(q: Tensor, k: Tensor, v: Tensor, score_mod: Any, *rest: Any) -> Any:
        mask_mod = rest[0][-1]
        if not isinstance(mask_mod, torch.fx.GraphModule):
            notice()
        return dense(q, k, v, score_mod, *rest)

    kernels[torch._C.DispatchKey.CompositeExplicitAutograd] = attention
    operator._dispatch_cache.clear()  # of earlier calls


@contextmanager
def attention_replaced(
    flex_operator: Callable[..., Any], sdpa: Callable[..., Any]
) -> Iterator[None]:
    """Has PyTorch's FlexAttention call `flex_operator` in place of its operator, also in eager code and for CPU tensors that need
    gradients, and `torch.nn.functional` show `sdpa`; whoever has another reference to `scaled_dot_product_attention` gets an error of
    PyTorch's from it. For all threads."""
    import torch.nn.functional as F
    from torch.nn.attention import flex_attention as flex

    def validate(query: Tensor, key: Tensor, value: Tensor) -> None:
        pass

    validate.is_ours = True  # type: ignore[attr-defined]
    replacements = {
        (flex, "flex_attention_hop"): flex_operator,
        (flex, "_validate_device"): validate,
        (flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG"): True,  # or eager code compiles itself
        (F, "scaled_dot_product_attention"): sdpa,
    }
    _know_torch_functions()
    previous = {(owner, name): getattr(owner, name) for owner, name in replacements}
    switches = {name: getattr(torch.backends.cuda, f"{name}_sdp_enabled")() for name in _SDPA}
    try:
        for (owner, name), value in replacements.items():
            setattr(owner, name, value)
        for name in switches:
            getattr(torch.backends.cuda, f"enable_{name}_sdp")(False)
        yield
    finally:
        for (owner, name), value in previous.items():
            setattr(owner, name, value)
        for name, was_enabled in switches.items():
            getattr(torch.backends.cuda, f"enable_{name}_sdp")(was_enabled)


@cache
def _know_torch_functions() -> None:
    """Has PyTorch write down which functions are its own; it does so once, at first use."""
    from torch._dynamo.trace_rules import get_torch_obj_rule_map

    torch.overrides.get_overridable_functions()
    get_torch_obj_rule_map()


_SDPA = ("flash", "mem_efficient", "math", "cudnn")  # what runs it, on CPUs too


def flex_operator() -> Any:
    """The operator that `flex_attention` calls: of q, k, v, score_mod, the BlockMask as a tuple, scale and kernel options."""
    return torch.ops.higher_order.flex_attention


def flex_identity() -> Any:
    """The score_mod of a call that has none."""
    from torch.nn.attention import flex_attention as flex

    return flex._identity


def types_in_schema(schema: str) -> tuple[list[str], list[str]]:
    """The types of the arguments and of the results of an op's schema, as "Tensor" and "List[int]"."""
    parsed = torch._C.parse_schema(schema)
    arguments, results = ([str(x.type) for x in xs] for xs in (parsed.arguments, parsed.returns))
    return arguments, results


def types_of_ops() -> tuple[type, ...]:
    """What `torch.ops.namespace.name` and `torch.ops.namespace.name.overload` are."""
    return torch._ops.OpOverloadPacket, torch._ops.OpOverload


def expect_other_lengths(tensor: Tensor) -> None:
    """Has Dynamo compile a graph with `tensor` as an input for any length of it, from the first time on."""
    torch._dynamo.maybe_mark_dynamic(tensor, 0)


def has_torch_function_mode() -> bool:
    """Whether a torch function mode wants to see what is called, also while Dynamo traces."""
    return torch._C._is_torch_function_mode_enabled()


def backend_that_dynamo_traces_for() -> Any:
    """The backend that will compile what Dynamo traces now; None outside of Dynamo, and for torch.export."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        return InstructionTranslator.current_tx().output.compiler_fn
    except AttributeError:
        return None


def traces_inner_graph() -> bool:
    """Whether Dynamo traces the body of an operator now (a checkpointed region), not the graph around it."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        return InstructionTranslator.current_tx().output.current_tracer.parent is not None
    except AttributeError:
        return False


def backends_around() -> list[Any]:
    """The backends of the functions compiled by torch.compile that are being called right now, innermost first."""
    from torch._dynamo.eval_frame import OptimizeContext

    found, frame = [], sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename.endswith("_dynamo/eval_frame.py"):
            context = frame.f_locals.get("self")
            if isinstance(context, OptimizeContext):
                found.append(context.callback)
        frame = frame.f_back  # type: ignore[assignment]
    return found


def layers_of(backend: Any) -> tuple[list[Any], dict[str, Any]]:
    """What Dynamo and torch.compile have wrapped in one another around a backend, outermost first, and the `options` that
    torch.compile was given."""
    layers: list[Any] = []
    options: dict[str, Any] = {}
    dynamo = (
        "_torchdynamo_orig_backend",
        "_torchdynamo_orig_callable",
    )  # the latter in older versions
    links = (*dynamo, "compiler_fn", "backend_compile_fn", "func", "__self__")
    while backend is not None and not any(backend is layer for layer in layers):
        layers.append(backend)
        options = options or (getattr(backend, "kwargs", None) or {}).get("options") or {}
        inner = (getattr(backend, link, None) for link in links)
        backend = next((layer for layer in inner if layer is not None), None)
    return layers, options


def graph_breaks() -> list[str]:
    """Why Dynamo broke graphs so far: the first sentence for each reason."""
    reasons = [
        text.partition("Explanation:")[2] for text in torch._dynamo.utils.counters["graph_break"]
    ]
    return [reason.strip().split("\n")[0].split(". ")[0].rstrip(".") for reason in reasons]


def num_graph_breaks() -> int:
    """How often Dynamo has broken a graph so far in this process."""
    return sum(torch._dynamo.utils.counters["graph_break"].values())


def num_compiled_graphs() -> int:
    """How many graphs Dynamo has compiled so far in this process, recompilations included."""
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"]


def __getattr__(name: str) -> Any:
    if name == "PreGradPass":  # made at first use: its base class brings Inductor with it
        return _pre_grad_pass_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@cache
def _pre_grad_pass_class() -> type:
    from torch._inductor.custom_graph_pass import CustomGraphPass

    class PreGradPass(CustomGraphPass):
        """Pickled as its identity, which is all that Inductor's caches have to know of it."""

        __qualname__ = "PreGradPass"

        def __init__(
            self,
            rewrite: Callable[[torch.fx.GraphModule], object] | None,
            identity: str,
            options: Any = None,
        ):
            self.rewrite, self.identity, self.options = rewrite, identity, options

        def __call__(self, graph: torch.fx.Graph) -> None:
            assert graph.owning_module is not None and self.rewrite is not None
            self.rewrite(graph.owning_module)

        def uuid(self) -> str:
            return self.identity

        def __deepcopy__(self, _: Any) -> Any:
            return self

        def __reduce__(self) -> Any:
            return (type(self), (None, self.identity))

    return PreGradPass


def pre_grad_pass(
    rewrite: Callable[[torch.fx.GraphModule], object], identity: str, options: Any = None
) -> Any:
    """A pass over Dynamo's graphs for `install_pre_grad_pass`; Inductor's caches key on `identity`. It keeps `options`."""
    return _pre_grad_pass_class()(rewrite, identity, options)


def installed_pre_grad_pass() -> Any:
    """Inductor's `pre_grad_custom_pass`, or None."""
    import torch._inductor.config as config

    return config.pre_grad_custom_pass


def install_pre_grad_pass(graph_pass: Any) -> None:
    """Makes `graph_pass` (or None) Inductor's `pre_grad_custom_pass`, in this thread and all that have not read it yet.

    What is set in Inductor's config may hold for the thread that sets it alone (torch 2.13); others read the default.
    """
    import torch._inductor.config as config

    config.pre_grad_custom_pass = graph_pass
    config._config["pre_grad_custom_pass"].default = graph_pass  # type: ignore[attr-defined]


def is_pre_grad_pass_of_ours(graph_pass: Any) -> bool:
    """Whether `graph_pass` was made by `pre_grad_pass`."""
    return isinstance(graph_pass, _pre_grad_pass_class())


def cpu_flash_forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, softmax_scale: float
) -> tuple[Tensor, Tensor]:
    """PyTorch's flash attention for CPUs: `(out, lse)` of `[batch, nheads, seqlen, head_dim]` tensors.

    All of one head_dim, whose stride is 1. `mask` is added to the scores: `[seqlen_q, seqlen_k]`, the dtype of `q`.
    A row that sees nothing gets a wrong lse. `is_causal` lets row r see the keys up to r.
    """
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, is_causal, attn_mask=mask, scale=softmax_scale
    )


def cpu_flash_backward(
    dout: Tensor,
    saved: Sequence[Tensor],
    mask: Tensor | None,
    is_causal: bool,
    softmax_scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of `cpu_flash_forward`, of which `q, k, v, out, lse` are `saved`. It takes `out` and `lse` as they come:
    those of a row over more keys than these give the share of these keys. It reads `out` only for the row sums of
    `dout * out`."""
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        dout, *saved, 0.0, is_causal, attn_mask=mask, scale=softmax_scale
    )


def indices_of_load_balancer(balancer: Any) -> Any:
    """Where a load balancer of PyTorch's or torchtitan's context parallelism puts tokens; None for other objects."""
    for name in ("generate_permutation", "_generate_indices"):
        generate = getattr(balancer, name, None)
        if generate is not None:
            return generate()
    return None


def context_parallel_style_of_torch(seq_dim: int) -> Any:
    """PyTorch's own style of context parallelism for modules that call FlexAttention with `(query, key, value, ...)`: keys and
    values are gathered along `seq_dim`, gradients are reduced and scattered. For `parallelize_module`."""
    from torch.distributed.tensor.experimental._context_parallel._attention import _ContextParallel

    return _ContextParallel(seq_dim, _ContextParallel.AttentionType.FLEX)


def block_mask_of_torch_rank(mesh: Any, block_mask: Any, balancer: Any) -> Any:
    """The BlockMask of this rank's queries and all keys, which goes with `context_parallel_style_of_torch`. Tokens are spread by
    `balancer`, which is one of `load_balancer_of_torch` or None for the order of the sequence."""
    from torch.distributed.tensor.experimental._context_parallel import _attention

    (local,) = _attention._context_parallel_shard(mesh, [block_mask], [0], balancer)
    return local


def load_balancer_of_torch(name: str, *arguments: Any) -> Any:
    """A load balancer of PyTorch's context parallelism, by the name of its class."""
    from torch.distributed.tensor.experimental._context_parallel import _load_balancer

    return getattr(_load_balancer, f"_{name}LoadBalancer")(*arguments)


def resolve_process_group(name: str) -> Any:
    """The process group called `name` (`ProcessGroup.group_name`); how ops name groups in a graph."""
    try:
        return torch.distributed.distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]
    except RuntimeError as error:
        raise ValueError(
            f"`group` must be a process group of this process or the name of one, got {name!r}"
        ) from error


def default_group_name() -> str:
    """The name of the default process group, also while a graph is traced."""
    return torch.distributed.distributed_c10d._get_default_group().group_name


def symmetric_empty(num_bytes: int, device: torch.device) -> Tensor:
    """Uninitialised uint8 memory of a GPU that `symmetric_rendezvous` can share with peers."""
    from torch._C._distributed_c10d import _SymmetricMemory

    return _SymmetricMemory.empty_strided_p2p((num_bytes,), (1,), torch.uint8, device)


def symmetric_rendezvous(memory: Tensor, group_name: str) -> Any:
    """Shares `memory` of `symmetric_empty` among the ranks of a group, which call this together with equal sizes.

    Returns when all ranks have called; peers' memory stays mapped while the result lives.
    """
    from torch.distributed import _symmetric_memory

    return _symmetric_memory.rendezvous(memory, group_name)  # type: ignore[arg-type]


def symmetric_addresses(rendezvous: Any) -> list[int]:
    """Where the memory of each rank of a rendezvous lies for this process."""
    ranks = range(rendezvous.world_size)
    return [rendezvous.get_buffer(rank, (1,), torch.uint8).data_ptr() for rank in ranks]


def raw_stream(device_index: int) -> int:
    """The current CUDA stream of a device as a number, without the object that torch.cuda.current_stream makes."""
    return torch._C._cuda_getCurrentRawStream(device_index)


def is_capturing() -> bool:
    """Whether the current CUDA stream is captured into a graph; of a process that uses CUDA."""
    return torch._C._cuda_isCurrentStreamCapturing()  # type: ignore[attr-defined]


def inductor_cache_key(tag: str) -> Any:
    """A context in which the keys of Inductor's caches on disk hold `tag` too."""
    config: Any = torch.compiler.config
    return config.patch(cache_key_tag=f"{config.cache_key_tag} {tag}".strip())


def without_disable(function: Any) -> Any:
    """What `torch._dynamo.disable` wraps, for a caller that Dynamo has been told to leave alone already; other functions as
    they are."""
    is_disabled = getattr(function, "_torchdynamo_disable", False)
    return function._torchdynamo_orig_callable if is_disabled else function


def spin_gpu(cycles: int) -> None:
    """Keeps the current CUDA stream busy for so many clock cycles, while the host enqueues what comes next."""
    torch.cuda._sleep(cycles)


def allow_repeated_backward() -> None:
    """Lets `torch.autograd.grad(..., retain_graph=True)` run more than once through compiled graphs."""
    import torch._functorch.config as config

    config.donated_buffer = False
