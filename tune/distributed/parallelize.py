"""Parallelize a model: stages -> activation checkpointing -> compile -> FSDP2 -> memory."""

import copy
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from fnmatch import filter as matching
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo
from torch.distributed.tensor import DTensor, Shard

from tune import rehearsal
from tune.distributed.activations import wrap_forward
from tune.distributed.context_parallel import split
from tune.distributed.expert_parallel import share_experts, shared_experts, whole_experts
from tune.distributed.loss_scale import LossScale
from tune.distributed.pace import count_time
from tune.distributed.pipeline import Pipeline, cut
from tune.distributed.shards import layout_of, norm_of_squares, sum_of_squares
from tune.distributed.tensor_parallel import share
from tune.distributed.world import World, current_world
from tune.errors import TuneError
from tune.parts import language_of, tower_blocks
from tune.types import PositiveFloat

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
"""torch dtypes by their names in settings."""
Dtype: TypeAlias = Literal["bf16", "fp16", "fp32"] | torch.dtype
StoredDtype: TypeAlias = Literal["bf16", "fp32"] | torch.dtype


def as_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """Return the torch dtype for a name of `DTYPES` or a floating-point dtype. Raises TuneError for others."""
    found = DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        known = ", ".join(f"{name} ({each})" for name, each in DTYPES.items())
        raise TuneError(f"dtype: {dtype!r} is not supported. Choose one of {known}")
    return found


@dataclass(frozen=True)
class Parallelism:
    """How a model is stored, computed and shared by processes. `parallelize` stores this as the model's attribute
    `parallelism`, for functions that run its steps or describe it."""

    whole: nn.Module | None = None  # the model before it was cut, on the meta device; None if it cannot be copied
    dtype: torch.dtype = torch.float32
    master_dtype: torch.dtype = torch.float32
    activation_checkpointing: str = "none"
    activation_offload: bool = False
    cpu_offload: bool = False
    compiles: bool = False
    loss_scale: LossScale | None = None  # only in fp16
    units_stay_gathered: bool = False  # from the first forward of a step to its last backward
    reduces_every_micro_batch: bool = False  # else only after the last one of a step

    @classmethod
    def of(cls, model: nn.Module) -> "Parallelism":
        """Return the properties of `model`, or the defaults if it was not parallelized."""
        return vars(model).get("parallelism", cls())


def parallelize(
    model: nn.Module,
    world: World | None = None,
    *,
    dtype: Dtype = "bf16",
    master_dtype: StoredDtype = "fp32",
    activation_checkpointing: Literal["none", "selective", "full"] = "none",
    activation_offload: bool = False,
    cpu_offload: bool = False,
    compile: bool | Sequence[str] = False,
) -> None:
    """Shard `model`, any module with repeated blocks, in place. Parameters with values keep them, as with
    `fully_shard`: all processes must have the same values. Parameters on the meta device get uninitialized memory.

    Computation and frozen parameters use `dtype`; trained parameters and optimizer states use `master_dtype`. Gradients
    are reduced in fp32 and summed over processes, not averaged: divide the loss by the token count of the step. In fp16
    gradients are scaled inside the model: see `LossScale`, stored as `model.parallelism.loss_scale`.

    With `tp`, a trained model that does not declare its shared layers uses the plan of `world`; see
    `tune.distributed.plans`.

    `compile` is all blocks or none, or patterns of block names (`blocks.1*`, as in `fnmatch`). Raises TuneError if a
    pattern matches no block.

    Two attributes of a module change this: `casts_parameters` (the module casts its trained parameters to the dtype of
    its input, as adapters do) and `trains_in_fp32` (its trained parameters are always in fp32).
    """
    world = current_world(world)
    dtype, master_dtype = as_dtype(dtype), as_dtype(master_dtype)
    scales = dtype == torch.float16 and any(parameter.requires_grad for parameter in model.parameters())
    if scales:
        _require_scalable(world, master_dtype)
    if (world.num_stages > 1 or world.experts is not None) and not all(each.is_meta for each in model.parameters()):
        raise TuneError(
            "parallel: with stages (pp) or shared experts (ep), cut a model before you load it. Create it under "
            "torch.device('meta') and load its weights afterwards (tune.checkpointers.Pretrained)"
        )
    # This logger warns once per mesh that a parameter is gathered over one axis after another.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    for module in model.modules():  # first: setting `data` does not change the type of a DTensor's shard
        for parameter in module.parameters(recurse=False):
            parameter.data = parameter.data.to(stored_dtype(module, parameter, dtype, master_dtype))
    if (planning := rehearsal.planning()) and world.device.type != "meta":
        planning.take_model(model, {
            "dtype": dtype, "master_dtype": master_dtype, "activation_checkpointing": activation_checkpointing,
            "activation_offload": activation_offload, "cpu_offload": cpu_offload, "compile": compile,
        })  # fmt: skip
        allocate(model, world.device, world.device)
        return
    blocks = repeated_blocks(model)
    if isinstance(compile, bool):
        compile = ["*"] if compile else []
    compiled = _named(blocks, model, compile)
    whole = on_meta(model)
    if world.num_stages > 1:
        cut(model, world, dtype)
        blocks = repeated_blocks(model)
    units = units_of(model, blocks)
    if world.experts is not None:
        share_experts(model, world.experts["ep"])
    plan = world.plan if any(parameter.requires_grad for parameter in model.parameters()) else None
    if world.mesh["tp"].size() > 1:
        if rounded := [name for name, module in model.named_modules() if getattr(module, "rounding", None)]:
            raise TuneError(
                f"parallel.tp: it cuts rows of {rounded[0]}, which share the scale of a rounding. Set it to 1"
            )
        on_both = world.experts and world.experts["ep", "tp"]
        share(model, blocks, units, world.mesh["tp"], plan, on_both, world.loss_parallel)
    elif plan:  # check the plan even with one process
        other = copy.deepcopy(model)
        share(other, repeated_blocks(other), units_of(other, repeated_blocks(other)), world.mesh["tp"], plan)
    if world.mesh["cp"].size() > 1:
        split(model, world.mesh["cp"])
    needs_cast = cast_by_fsdp(model, dtype, master_dtype)
    for block in blocks:
        how = activation_checkpointing, block in compiled, activation_offload
        wrap_forward(block, *how, backwards_wait=world.num_stages > 1)
        if world.size > 1:
            count_time(block)
    for block in tower_blocks(model):
        if any(parameter.requires_grad for parameter in block.parameters()):  # else it keeps nothing for backward
            wrap_forward(block, activation_checkpointing, False, activation_offload)
    # With nothing to gather, cast or move, FSDP would only add a copy of every parameter and gradient per micro-batch.
    if world.size > 1 or needs_cast or cpu_offload:
        _shard(model, units, world, dtype, needs_cast, cpu_offload)
    allocate(model, torch.device("cpu") if cpu_offload else world.device, world.device)
    if world.size > 1:
        model.register_forward_pre_hook(_require_parameters_of_head, with_kwargs=True)
    parallelism: Any = Parallelism(
        whole,
        dtype,
        master_dtype,
        activation_checkpointing,
        activation_offload,
        cpu_offload,
        compiles=bool(compiled),
        loss_scale=LossScale(model) if scales else None,
        units_stay_gathered=world.units_stay_gathered,
        reduces_every_micro_batch=world.reduce_every_micro_batch,
    )
    model.parallelism = parallelism


def on_meta(model: nn.Module) -> nn.Module | None:
    """Return a copy of `model` with its parameters on the meta device, where they have shapes and no values.

    None if a part of the model, such as a lock or an open file, cannot be copied.
    """
    shapes = {
        id(parameter): nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
        for parameter in model.parameters()
        if not parameter.is_meta
    }
    try:
        return copy.deepcopy(model, shapes)
    except (TypeError, RuntimeError, AttributeError):
        return None


def _require_scalable(world: World, master_dtype: torch.dtype) -> None:
    """Raise TuneError if loss scaling does not support this layout."""
    axis = "pp" if world.num_stages > 1 else "ep"
    if world.num_stages > 1 or world.experts is not None:
        raise TuneError(
            f"compute.dtype: fp16 does not support parallel.{axis}. Set parallel.{axis}=1, or compute.dtype=bf16"
        )
    if master_dtype != torch.float32:
        raise TuneError(f"compute.master_dtype: fp16 needs fp32, got {master_dtype}. Set compute.master_dtype=fp32")


def _require_parameters_of_head(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise TuneError if a head has trained parameters that are not the model's: nothing would sum their gradients."""
    for head in (*args[1:2], kwargs.get("head")):
        if not isinstance(head, nn.Module) or head in model.modules():
            continue
        if names := [name for name, parameter in head.named_parameters() if parameter.requires_grad]:
            kind = type(head).__name__
            raise TuneError(
                f"loss: {kind} has the parameter {names[0]}, which is not in the model, so its gradients are not "
                f"summed over processes. Add it before distributed.parallelize: model.{kind.lower()} = {kind}(...)"
            )


def require_layout(model: nn.Module, world: World, dtype: Dtype, master_dtype: StoredDtype) -> None:
    """Raise TuneError as `parallelize` would; `model` is on the meta device and stays unchanged."""
    if world.size > 1:
        nowhere = replace(world, device=torch.device("meta"))
        parallelize(copy.deepcopy(model), nowhere, dtype=dtype, master_dtype=master_dtype)


def allocate(model: nn.Module, device: torch.device, buffer_device: torch.device) -> None:
    """Move parameters to `device` and buffers to `buffer_device`. Tensors on the meta device get uninitialized memory;
    others keep their values. Raises TuneError for meta buffers that no checkpoint has."""
    persistent = model.state_dict().keys()
    buffers = dict(model.named_buffers(remove_duplicate=False))
    if lost := [name for name, buffer in buffers.items() if buffer.is_meta and name not in persistent]:
        raise TuneError(
            f"model: the buffer {lost[0]} has no values: it was created on the meta device, and no checkpoint stores "
            "it. Create it with values, e.g. torch.arange(..., device='cpu'), or make it persistent"
        )
    rehearsed = rehearsal.current()
    with rehearsed.fake_tensors() if rehearsed and device.type != "meta" else nullcontext():
        model._apply(lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.to(device))
        placed = {
            buffer: torch.empty_like(buffer, device=buffer_device) if buffer.is_meta else buffer.to(buffer_device)
            for buffer in buffers.values()
        }
    for name, buffer in buffers.items():
        module, _, kind = name.rpartition(".")
        setattr(model.get_submodule(module), kind, placed[buffer])


def stored_dtype(
    module: nn.Module, parameter: Tensor, dtype: str | torch.dtype, master_dtype: str | torch.dtype
) -> torch.dtype:
    """Return the dtype in which a parameter of `module` is stored."""
    if not parameter.is_floating_point():
        return parameter.dtype
    if parameter.requires_grad and getattr(module, "trains_in_fp32", False):
        return torch.float32
    return as_dtype(master_dtype if parameter.requires_grad else dtype)


def cast_by_fsdp(model: nn.Module, dtype: str | torch.dtype, master_dtype: str | torch.dtype) -> set[nn.Parameter]:
    """Return the trained parameters that FSDP must cast because their modules do not."""
    others = [module for module in model.modules() if not getattr(module, "casts_parameters", False)]
    trained = {each for module in others for each in module.parameters(recurse=False) if each.requires_grad}
    return set() if as_dtype(dtype) == as_dtype(master_dtype) else trained


def _shard(
    model: nn.Module, units: list[nn.Module], world: World, dtype: torch.dtype, casts: set[nn.Parameter], offload: bool
) -> None:
    """Shard the units with FSDP2.

    The root unit stays gathered from forward to backward: the loss reads the head weight, and backward starts with it.
    With ZeRO 1 and 2 all units stay gathered from the first forward of a step to its last backward. So do the units of
    a pipeline stage, since other micro-batches run in between. With ZeRO 0 nothing is sent: FSDP copies the process's
    weights in the compute dtype and frees the copy. Raises TuneError for a scalar parameter."""
    if scalars := [name for name, parameter in model.named_parameters() if parameter.ndim == 0]:
        raise TuneError(
            f"model: the parameter {scalars[0]} is a scalar, which FSDP cannot shard. Give it one dimension: "
            "torch.ones(1) for torch.tensor(1.0)"
        )
    experts = {parameter for module in shared_experts(model) for parameter in module.parameters()}
    placements = None if world.experts is None else _placements(experts, world.experts)
    policy = CPUOffloadPolicy(pin_memory=world.device.type == "cuda") if offload else OffloadPolicy()
    taken: set[nn.Parameter] = set()
    for unit in units:
        parameters = set(unit.parameters()) - taken
        cast = dtype if parameters & casts else None
        _require_one_type(unit, parameters, cast)
        if world.device.type == "meta" and dist.get_backend() == "fake":  # only a check; FSDP would import the compiler
            taken |= parameters
            continue
        sharded = fully_shard(
            unit,
            mesh=world.shards,
            reshard_after_forward=unit is not model and not world.units_stay_gathered,
            shard_placement_fn=placements,
            # Casting inputs would round the columns and weights of a batch, and activations have the weights' dtype
            # already.
            mp_policy=MixedPrecisionPolicy(param_dtype=cast, reduce_dtype=torch.float32, cast_forward_inputs=False),
            offload_policy=policy,
        )
        taken |= set(unit.parameters())
        if world.size > 1:  # with one process, dividing by one would only add a copy
            sharded.set_gradient_divide_factor(1.0)
            # gloo cannot divide while it reduces. With one shard there is no reduction over shards: FSDP divides by
            # itself, and would divide again after the sum over replicas.
            sharded.set_force_sum_reduction_for_comms(world.shards.shape[-1] > 1)


def _placements(experts: set[nn.Parameter], mesh: DeviceMesh) -> Callable[[nn.Parameter], Any]:
    """Return a placement function that shards `experts` over `dp_shard` of their `mesh`, along the first dimension that
    is divisible: a process may have fewer experts than shards. Raises TuneError if this torch does not support it."""
    try:
        from torch.distributed.fsdp._fully_shard._fsdp_common import ShardPlacementResult
    except ImportError as error:
        raise TuneError(f"parallel.ep: needs torch 2.12 or newer; found {torch.__version__}") from error
    places = FSDPMeshInfo(mesh["dp_shard"], 0)
    if mesh["dp_replicate"].size() > 1:
        places = HSDPMeshInfo(mesh["dp_replicate", "dp_shard"], 1, 0)
    size = places.shard_mesh_size

    def placement(parameter: nn.Parameter) -> ShardPlacementResult | None:
        if parameter not in experts:
            return None
        assert isinstance(parameter, DTensor)
        even = (Shard(dim) for dim, count in enumerate(parameter.to_local().shape) if count % size == 0)
        return ShardPlacementResult(next(even, None), places)

    return placement


def units_of(model: nn.Module, blocks: list[nn.Module]) -> list[nn.Module]:
    """Return the modules that FSDP gathers one at a time: blocks, a tower's blocks, embeddings of tokens that are not
    tied to the head, and the model for all other weights. The head is the model's `head_module`, else a Linear child
    with an output per token."""
    linears = [child for child in model.children() if isinstance(child, nn.Linear)]
    says = hasattr(model, "head_module")

    def is_untied(embedding: nn.Embedding) -> bool:
        heads = [each for each in linears if says or each.out_features == embedding.num_embeddings]
        return bool(heads) and all(each.weight is not embedding.weight for each in heads)

    if says:  # other Linear children are not the head
        linears = [each for each in linears if each is model.head_module]
    # Towers read the weights of embeddings of positions without calling them, so these are not units.
    embeddings = [module for module in language_of(model).modules() if isinstance(module, nn.Embedding)]
    return [*blocks, *tower_blocks(model), *filter(is_untied, embeddings), model]


def _require_one_type(unit: nn.Module, parameters: set[nn.Parameter], cast: torch.dtype | None) -> None:
    """Raise TuneError if a unit mixes dtypes: FSDP casts all parameters of a unit or none, and reduces one dtype."""
    adapted = (each for each in unit.modules() if getattr(each, "rounding", None) and hasattr(each, "lora_a"))
    if cast and any(parameters & {*each.parameters(recurse=False)} for each in adapted):
        raise TuneError(
            "adapter.modules_to_save: FSDP would cast the adapters of a block before they are merged and rounded. Set "
            "compute.dtype and compute.master_dtype to one type"
        )
    in_fp32 = [module for module in unit.modules() if getattr(module, "trains_in_fp32", False)]
    kept = {each for module in in_fp32 for each in module.parameters(recurse=False) if each.requires_grad} & parameters
    trained = {parameter.dtype for parameter in parameters if parameter.requires_grad}
    if kept and (cast or torch.float32, *trained) != (torch.float32, torch.float32):
        raise TuneError(
            "dtype: adapter.dora trains in fp32, adapter.modules_to_save in another dtype. FSDP needs one dtype per "
            "block: remove modules of blocks from adapter.modules_to_save, set adapter.dora=false, or set "
            "compute.dtype=fp32 with compute.master_dtype=fp32"
        )


def _named(blocks: list[nn.Module], model: nn.Module, patterns: Sequence[str]) -> set[nn.Module]:
    """Return the `blocks` of `model` that `patterns` match. Raises TuneError if a pattern matches none."""
    names = {name: module for name, module in model.named_modules() if module in blocks}
    if wrong := [pattern for pattern in patterns if not matching(names, pattern)]:
        raise TuneError(f"compile: {wrong[0]} matches no block. Names look like {', '.join([*names][:3])}")
    return {names[name] for pattern in patterns for name in matching(names, pattern)}


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the blocks of a model: the members of the largest nn.ModuleList of its language part. Raises TuneError if
    it has none."""
    lists = [list(module) for module in language_of(model).modules() if isinstance(module, nn.ModuleList)]
    if not lists:
        raise TuneError(f"{type(model).__name__} has no nn.ModuleList of blocks, which sharding needs")
    found = max(lists, key=lambda blocks: sum(p.numel() for block in blocks for p in block.parameters()))
    return [block for block in found if any(True for _ in block.parameters())]  # other stages' blocks are empty


@contextmanager
def gathered(model: nn.Module) -> Iterator[None]:
    """A context in which all weights of a sharded model are gathered. Forwards without gradients then wait for no other
    process, so each process can run any number of them. All processes must enter it together."""
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for unit in units:
        unit.set_reshard_after_forward(False, recurse=False)
        unit.unshard()
    try:
        with whole_experts(model):
            yield
    finally:
        for unit in units:
            unit.reshard()
            stays = unit is model or Parallelism.of(model).units_stay_gathered  # else FSDP's default
            unit.set_reshard_after_forward(not stays, recurse=False)


def reshard(model: nn.Module) -> None:
    """Free the root's weights, which forwards without gradients leave gathered in the compute dtype."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def loss_scales(model: nn.Module) -> list[LossScale]:
    """Return the loss scales of a model and of the models inside it."""
    scales = (Parallelism.of(module).loss_scale for module in model.modules())
    return [scale for scale in scales if scale is not None]


def set_gradient_sync(model: nn.Module, is_last: bool) -> None:
    """Set whether FSDP reduces gradients in the next backward. The last backward of a step (`is_last`) does, and with
    `world.reduce_every_micro_batch` all do. Otherwise gradients accumulate on each process."""
    if isinstance(model, FSDPModule):
        parallelism = Parallelism.of(model)
        model.set_requires_gradient_sync(is_last or parallelism.reduces_every_micro_batch)
        if parallelism.units_stay_gathered:
            model.set_is_last_backward(is_last)
            model.set_reshard_after_backward(is_last)


def clip_grad_norm_(
    parameters: Iterable[Tensor], max_norm: PositiveFloat | None, pipeline: Pipeline | None = None
) -> Tensor:
    """Return the norm of all gradients, including those of other stages of `pipeline`. If the norm exceeds `max_norm`,
    scale the gradients to `max_norm`."""
    elsewhere = pipeline.counted_elsewhere if pipeline else ()
    by_mesh: dict[object, list[Tensor]] = defaultdict(list)  # torch scales gradients of one mesh at a time
    by_layout: dict[object, list[Tensor]] = defaultdict(list)  # and sums gradients of one layout at a time
    for parameter in parameters:
        by_mesh[getattr(parameter, "device_mesh", None)].append(parameter)
        if (grad := parameter.grad) is not None and parameter not in elsewhere:
            by_layout[layout_of(grad)].append(grad)
    norm = norm_of_squares([sum_of_squares(group) for group in by_layout.values()])
    norm = pipeline.norm(norm) if pipeline and pipeline.size > 1 else norm
    if max_norm is not None:
        for group in by_mesh.values():
            nn.utils.clip_grads_with_norm_(group, max_norm, norm)
    return norm
