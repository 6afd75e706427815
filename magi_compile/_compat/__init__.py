"""All use of private PyTorch names: one function per need, in rooms by what they bridge. Callers write
`_compat.source_name(...)`."""

# ruff: noqa: F401  (these are for the other modules of this package)

from magi_compile._compat.aten import (
    below_autograd,
    cpu_flash_backward,
    cpu_flash_forward,
    has_no_address,
    has_torch_function_mode,
    may_change_uncounted,
    types_in_schema,
    types_of_ops,
    version_of,
)
from magi_compile._compat.cuda import (
    current_stream,
    is_capturing,
    is_in_use,
    on_stream,
    raw_stream,
    spin_gpu,
)
from magi_compile._compat.distributed import (
    PERMUTED_TOKENS,
    block_mask_of_torch_rank,
    context_parallel_style_of_torch,
    default_group_name,
    indices_of_load_balancer,
    load_balancer_of_torch,
    number_of_groups,
    own_store_of,
    resolve_process_group,
    store_of,
    symmetric_addresses,
    symmetric_empty,
    symmetric_rendezvous,
    timeout_of,
    timeout_reader,
)
from magi_compile._compat.dynamo import (
    as_user_error,
    backend_that_dynamo_traces_for,
    backends_around,
    copy_of_dynamo_graph,
    example_of_input,
    expect_other_lengths,
    graph_breaks,
    layers_of,
    mark_as_without_source,
    num_compiled_graphs,
    num_graph_breaks,
    source_name,
    traces_inner_graph,
    without_disable,
)
from magi_compile._compat.flex import (
    EXPORTED_LOOKUP_ARGUMENTS,
    LARGE_SPARSE_BLOCK_SIZE,
    attention_replaced,
    flex_identity,
    flex_operator,
    give_block_masks_ndim,
    is_exported_lookup,
    scalar_indexing,
    watch_flex_attention,
)
from magi_compile._compat.functorch import (
    allow_repeated_backward,
    has_tangents,
    is_transformed,
    vmap_in_ops,
)
from magi_compile._compat.inductor import (
    inductor_cache_key,
    inductor_options,
    install_pre_grad_pass,
    installed_pre_grad_pass,
    is_inductor_option,
    is_pre_grad_pass_of_ours,
    pre_grad_pass,
)
from magi_compile._compat.modes import is_in_backward, outside_of_modes, without_autograd
from magi_compile._compat.tracing import (
    differ,
    differ_now,
    fake_mode_of,
    graph_of,
    is_fake,
    is_of_higher_order,
    is_traced,
    share_memory,
    size_at_hand,
    static_fake_mode,
    symbolic_fake_mode,
    symbolic_int,
    traced_to_aten,
    without_fake_tensors,
    without_symbols,
)
