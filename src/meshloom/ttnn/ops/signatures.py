"""TTNN's signatures are data: `signatures.txt` has a line for every form of every op, without defaults.

A `Binding` takes the arguments of a call by them. What the function behind the op names goes to it; what says how a
result is kept (`FINISH`) goes to whoever makes the tensor; what concerns the speed of hardware alone (`SPEED`) is
checked for its type and dropped. What the public signature shows is all of it, with the function's own defaults.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from importlib import resources
from typing import Any

from meshloom.errors import ArgumentError, UnsupportedError, closest
from meshloom.ttnn.device.cores import CoreCoord, CoreGrid, CoreRangeSet
from meshloom.ttnn.ops.arguments import annotate
from meshloom.ttnn.ops.configs import DeviceComputeKernelConfig, ProgramConfig
from meshloom.ttnn.tensor.formats import DataType, Layout, Tile
from meshloom.ttnn.tensor.memory import MemoryConfig
from meshloom.ttnn.tensor.tensor import Tensor


def _is(*kinds: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, kinds)


def _are_numbers(value: Any) -> bool:
    return all(isinstance(each, int) for each in (value if isinstance(value, (list, tuple)) else (value,)))


# Arguments with one meaning in all ops, most of them about speed only: what they may be, beside None.
CHECKS: dict[str, Callable[[Any], bool]] = {
    "memory_config": _is(MemoryConfig),
    "dtype": _is(DataType),
    "output_dtype": _is(DataType),
    "layout": _is(Layout),
    "output_layout": _is(Layout),
    "output_tile": _is(Tile),
    "output_tensor": _is(Tensor, tuple, list),
    "optional_output_tensor": _is(Tensor),
    "optional_tensor": _is(Tensor),
    "compute_kernel_config": _is(DeviceComputeKernelConfig),
    "program_config": _is(ProgramConfig),
    "core_grid": _is(CoreGrid, CoreCoord, CoreRangeSet, tuple),
    "sub_core_grids": _is(CoreRangeSet),
    **dict.fromkeys(
        "num_links num_workers_per_link num_buffers_per_channel chunks_per_sync vector_mode".split(), _is(int)
    ),
    **dict.fromkeys(
        "fast_and_approximate_mode use_multicore numeric_stable use_2d_core_grid use_welford "
        "use_l1_small_for_semaphores disable_compensated_sum enable_secondary_dm".split(),
        _is(bool),
    ),
}

# Where an op of the original takes something else under such a name: one number of links for every dim.
OWN_CHECKS: dict[str, dict[str, Callable[[Any], bool]]] = {
    "experimental.neighbor_pad_async": {"num_links": _are_numbers}
}


# What says how a result is kept, unless the function of an op names it itself: the argument of `Made.tensor`.
FINISH = {
    **dict.fromkeys("memory_config output_memory_config output_mem_config".split(), "memory_config"),
    "dtype": "dtype",
    "output_dtype": "dtype",
    "layout": "layout",
    "output_layout": "layout",
    **dict.fromkeys("output_tensor optional_output_tensor output out input_grad input_grad_tensor".split(), "output"),
}

# What changes no result here: where and how fast hardware works, and what it needs for that.
SPEED = frozenset(
    """ag_global_semaphores all_gather_core_grid_offset applied_shard_scheme assume_unique attn_mask_block_map
    barrier_semaphore barrier_semaphores causal_mask ccl_core_grid_offset chunk_width_in_mm_blocks chunks_per_sync
    compute_config compute_kernel_config compute_with_storage_grid_size config config_tensor_in_dram core_grid
    correction cq_id cross_device_semaphore data_valid_semaphore disable_compensated_sum dispatch_algorithm
    drain_sync_tilizer_core dram_slice_config embeddings_type enable_secondary_dm eye fast_and_approximate_mode
    final_semaphore force_transpose fp32_dest_acc fsdp_multi_device_global_semaphore fsdp_topology global_cb
    global_semaphore grid_size inplace input_mask input_mux_cores intermediate_memory_config
    intermediate_memory_config_rs intermediate_packet_buffer intermediate_tensor keep_l1_aligned masks
    mm_N_full_block_wt mm_block_ht mm_block_wt mm_cores_y mm_credit_counters mm_progress_counters
    mm_signal_aggregator_mode mm_window_blocks momentum_buffer_out_memory_config multi_device_global_semaphore
    mux_core_range_set negative_mask neighbor_semaphore nnz num_buffers_per_channel num_links num_out_blocks
    num_preferred_links num_workers_per_link numeric_stable ones op output_tile overlap_qk_coregrid pad_value
    padding_idx persistent_intermediate_buffer prefetcher_pipes program_config queue_id read_local_slice_from_input
    ready_semaphore reallocate_halo_output reallocate_output recip_tensor reciprocals
    reduce_scatter_core_grid_offset reshape_tile_mode rs_global_semaphores rs_intermediate_mem_config
    skip_padding_fill slice_config sparse_grad strategy strided_all_gather_core_grid_offset sub_core_grid
    sub_core_grids sub_device_id subdevice_id topology tril use_2d_core_grid use_broadcast use_column_major_ccl
    use_falcon7b_backend use_l1_small_for_semaphores use_legacy use_low_perf use_multicore use_noc1_only
    use_optimal_ccl_for_llama use_transpose_as_fold use_welford user_ids using_persistent_buffers
    worker_core_range_set worker_mode wy_inverse""".split()
)

# What the public signature says of arguments that no function names.
TYPES = {
    "memory_config": "MemoryConfig | None",
    "compute_kernel_config": "DeviceComputeKernelConfig | None",
    "program_config": "ProgramConfig | None",
    "sub_core_grids": "CoreRangeSet | None",
    **dict.fromkeys(("dtype", "output_dtype"), "DataType | None"),
    **dict.fromkeys(("layout", "output_layout"), "Layout | None"),
    **{name: "Tensor | None" for name, key in FINISH.items() if key == "output"},
}


@cache
def forms() -> Mapping[str, Sequence[str]]:
    """The argument lists of every op of the original: `input_tensor, *, memory_config=`."""
    found: dict[str, list[str]] = {}
    text = resources.files("meshloom.ttnn.ops").joinpath("signatures.txt").read_text(encoding="utf-8")
    for line in text.splitlines():
        name, _, rest = line.partition("(")
        found.setdefault(name, []).append(rest[:-1])
    return found


class Binding:
    """How the arguments of an op are taken. The text is read when the op is first called, or its signature asked for.

    `also` are names that are accepted beside those of the text, `more` are functions that `**` arguments go on to,
    `drops` are names that change no result of this op, `refuses` those that are not covered, with what to do `instead`.
    A function that has an argument `kind` is told the dtype that was asked for, by itself or by an output.
    """

    __slots__ = (
        "also", "checks", "drops", "function", "instead", "is_open", "kinded", "more", "names", "order", "plain",
        "refuses", "spelled", "takes",
    )  # fmt: skip

    def __init__(
        self,
        names: Sequence[str],
        function: Callable[..., Any],
        spelled: Mapping[str, str],
        also: str,
        more: Sequence[Callable[..., Any]],
        drops: str = "",
        refuses: str = "",
        instead: str | None = None,
    ) -> None:
        self.names, self.function, self.spelled, self.also, self.more = names, function, spelled, also, more
        self.drops, self.refuses, self.instead = drops.split(), refuses.split(), instead
        self.plain = -1  # how many positional arguments go to the function as they are
        self.order: Sequence[str] = ()  # the names of positional arguments
        self.takes: dict[str, str | None] = {}  # "": the function; a key of `Made.tensor`; None: dropped or refused
        self.kinded = self.is_open = False
        self.checks: Mapping[str, Callable[[Any], bool]] = CHECKS

    def bind(
        self, args: tuple[Any, ...], given: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any], dict[str, Any]]:
        """The arguments for the function by position and by name, and those that say how the result is kept."""
        if self.plain < 0:
            self.read()
        if len(args) > self.plain:
            args, given = self._by_name(args, given)
        own: dict[str, Any] = {}
        rest: dict[str, Any] = {}
        takes, checks = self.takes, self.checks
        for argument, value in given.items():
            fits = checks.get(argument)
            if fits is not None and value is not None and not fits(value):
                raise ArgumentError(f"ttnn.{self.names[0]}: {argument}={value!r} is of the wrong type")
            key = takes.get(argument, _UNKNOWN)
            if key == "" or (key == _UNKNOWN and self.is_open):
                own[argument] = value
            elif key == _UNKNOWN:
                raise ArgumentError(
                    f"ttnn.{self.names[0]}() got an unexpected keyword argument {argument!r}",
                    fix=closest(argument, list(takes)),
                )
            elif argument in self.refuses:
                self._check_absent(argument, value)
            elif key is not None and value is not None:
                rest[key] = value
        if rest and self.kinded and ("dtype" in rest or "output" in rest):
            own["kind"] = rest["dtype"] if "dtype" in rest else rest["output"].dtype
        return args, own, rest

    def _check_absent(self, argument: str, value: Any) -> None:
        """What is not covered may be given as nothing: None, False or 0."""
        if value is not None and (not isinstance(value, (bool, int, float)) or value):
            raise UnsupportedError(f"ttnn.{self.names[0]}: {argument} not covered", fix=self.instead)

    def _by_name(self, args: tuple[Any, ...], given: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional arguments that the function does not have at their place, by name."""
        if len(args) > len(self.order):
            raise ArgumentError(
                f"ttnn.{self.names[0]}() takes {len(self.order)} positional arguments but {len(args)} were given",
                fix=f"({', '.join(self.order)})",
            )
        named = dict(zip(self.order[self.plain :], args[self.plain :], strict=False))
        for argument in named:
            if argument in given:
                raise ArgumentError(f"ttnn.{self.names[0]}() got multiple values for argument {argument!r}")
        return args[: self.plain], {**named, **given}

    def read(self) -> None:
        """Work out what is taken, from the text and the function."""
        own = inspect.signature(self.function).parameters.values()
        kinds = {each.kind for each in own}
        self.is_open = inspect.Parameter.VAR_KEYWORD in kinds and not self.more
        at = [each.name for each in own if each.kind is _ORDERED and each.name != "kind"]
        several = [self._split(form) for name in self.names for form in forms().get(name, ())]
        listed = dict.fromkeys(argument for form in several for group in form for argument in group)
        several.append(([], self.also.split()))
        known = {argument for form in several for group in form for argument in group}
        mine = {each.name for each in own if each.kind in _NAMED}
        passed = {each.name for each in self._passed_on()}
        self.kinded = "kind" in mine | passed
        taken = (mine | passed & known) - {"kind"}
        takes: dict[str, str | None] = {each: "" for each in (*listed, *sorted(taken - listed.keys())) if each in taken}
        self.order = at
        for ordered, named in several:
            for argument in (*ordered, *named):
                if argument not in takes:
                    takes[argument] = self._beside(argument)
            here = [each for each in ordered if each in mine]
            if here == at[: len(here)] and inspect.Parameter.VAR_POSITIONAL not in kinds:
                self.order = max(self.order, [*ordered, *at[len(here) :]], key=len)
        same = [a == b for a, b in zip(at, self.order, strict=False)]
        self.takes = takes
        if self.names[0] in OWN_CHECKS:
            self.checks = CHECKS | OWN_CHECKS[self.names[0]]
        self.plain = 1 << 30 if inspect.Parameter.VAR_POSITIONAL in kinds else (*same, False).index(False)

    def _passed_on(self) -> Sequence[inspect.Parameter]:
        """What `**` arguments of the function go on to: those that the other one takes by name."""
        listed = [each for function in self.more for each in inspect.signature(function).parameters.values()]
        return [each for each in listed if each.kind is inspect.Parameter.KEYWORD_ONLY]

    def _split(self, form: str) -> tuple[list[str], list[str]]:
        """The positional and the named arguments of a form, spelled as ours."""
        ordered: list[str] = []
        named: list[str] = []
        into = ordered
        for argument in filter(None, form.split(", ")):
            if argument in ("*", "/"):
                into = named
            else:
                plain = argument.rstrip("=")
                into.append(self.spelled.get(plain, plain))
        return ordered, named

    def _beside(self, argument: str) -> str | None:
        """What becomes of an argument that the function does not name."""
        if argument in self.drops or argument in self.refuses:
            return None
        if self.is_open:
            return ""
        if argument not in FINISH and argument not in SPEED:
            raise ArgumentError(f"ttnn.{self.names[0]}: nothing takes the argument {argument!r} of the original")
        return FINISH.get(argument)

    def signature(self) -> inspect.Signature:
        """All that the op takes, with the function's defaults and annotations where it names an argument."""
        if self.plain < 0:
            self.read()
        found = inspect.signature(self.function)
        named_here = (*self._passed_on(), *found.parameters.values())
        own = {each.name: annotate(each) for each in named_here if each.name != "kind"}
        var = [each for each in own.values() if each.kind is inspect.Parameter.VAR_POSITIONAL]
        named = [name for name in self.takes if name not in self.order]
        listed = [*_with_defaults((own.get(name) or _other(name)).replace(kind=_ORDERED) for name in self.order), *var]
        listed += [own.get(name) or _other(name) for name in dict.fromkeys(named)]
        listed += [each for each in own.values() if each.kind is inspect.Parameter.VAR_KEYWORD and self.is_open]
        returns = found.return_annotation
        shown = returns.replace("Made", "Tensor") if isinstance(returns, str) else returns
        return inspect.Signature(listed, return_annotation=shown)


_UNKNOWN = "unknown"
_ORDERED = inspect.Parameter.POSITIONAL_OR_KEYWORD
_NAMED = (_ORDERED, inspect.Parameter.KEYWORD_ONLY)


def _other(name: str) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=TYPES.get(name, "Any"))


def _with_defaults(parameters: Iterable[inspect.Parameter]) -> Iterator[inspect.Parameter]:
    """Parameters of which none without a default follows one that has one."""
    listed = list(parameters)
    for place, each in enumerate(listed):
        behind = any(after.default is inspect.Parameter.empty for after in listed[place:])
        yield each.replace(default=inspect.Parameter.empty) if behind and each.default is None else each
