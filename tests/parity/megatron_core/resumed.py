"""Runs of megatron-core with its distributed optimizer, in four processes by gloo: saved, gone on with, and resumed.

`python -m tests.parity.megatron_core.resumed MODE FOLDER`, once for each rank; `ranks` of this folder starts them.
`train` trains the cases of `RESUMED` that `FOLDER/cases.json` names for `SAVED` steps, saves each with several layouts
of the optimizer, and goes on to the end: `NAME-train.npz` has the losses. `resume` loads what mtjax wrote,
`FOLDER/written/NAME`, and goes on from there. `tiny` writes what `tests/convert/resumed.zip` holds.
"""

import argparse
import json
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from tests.parity.megatron_core.world import on_cuda_types, without_cuda

without_cuda()
on_cuda_types()

from megatron.core import dist_checkpointing, parallel_state
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from tests.parity.megatron_core.cases import MODELS, RESUMED, RUN, SAVED, TINY, TINY_RUN, run_arguments
from tests.parity.megatron_core.datasets import TOKENIZER
from tests.parity.megatron_core.models import fill, logits_of, shaken, sharded
from tests.parity.megatron_core.torch_dist import groups, init_ranks, models_of

MOMENTS = ("exp_avg", "exp_avg_sq")
_set = DistributedOptimizer._set_main_param_and_optimizer_states


def _with_step(self: Any, parameter: Any, tensors: dict[str, Any]) -> None:
    """Adds the step that torch's Adam has for each parameter: it is loaded before, with the groups."""
    group, order = self.model_param_group_index_map[parameter]
    state = self.optimizer.state[self.optimizer.param_groups[group]["params"][order]]
    _set(self, parameter, {"step": state["step"], **tensors})


DistributedOptimizer._set_main_param_and_optimizer_states = _with_step


class Trained:
    """A model with its optimizer, schedule and data, on one rank."""

    def __init__(self, folder: Path, name: str) -> None:
        case = (RESUMED | TINY_RUN)[name]
        run = run_arguments(folder if name in RESUMED else Path("/data"))
        self.arguments = (MODELS | {"tiny": TINY})[case["model"]] | case["arguments"] | run
        a, dtype = self.arguments, torch.bfloat16 if case["bf16"] else torch.float32
        with groups(), torch.no_grad():
            whole = sharded(shaken(a))
        self.case, self.dtype = case, dtype
        self._groups = groups(*case["degrees"])
        self._groups.__enter__()
        inner = models_of(a, case["degrees"])
        with torch.no_grad():
            for model in inner:
                fill(model, whole)
                model.to(dtype)
        ddp = DistributedDataParallelConfig(
            use_distributed_optimizer=case["distributed"],
            grad_reduce_in_fp32=True,
            overlap_grad_reduce=case["bucket"] is not None,
            bucket_size=case["bucket"],
        )
        self.models = [
            DistributedDataParallel(model.config, ddp, model, disable_bucketing=i > 0) for i, model in enumerate(inner)
        ]
        self.model = self.models[0]
        settings = OptimizerConfig(
            optimizer="adam",
            lr=RUN["max_lr"],
            min_lr=RUN["min_lr"],
            weight_decay=RUN["end_wd"],
            adam_beta2=RUN["beta2"],
            adam_eps=RUN["epsilon"],
            clip_grad=RUN["clip_grad"],
            bf16=case["bf16"],
            params_dtype=dtype,
            use_distributed_optimizer=case["distributed"],
        )
        self.optimizer = get_megatron_optimizer(settings, self.models)
        size = RUN["batch"]
        self.scheduler = OptimizerParamScheduler(
            self.optimizer,
            init_lr=0.0,
            max_lr=RUN["max_lr"],
            min_lr=RUN["min_lr"],
            lr_warmup_steps=RUN["warmup"] * size,
            lr_decay_steps=RUN["steps"] * size,
            lr_decay_style="cosine",
            start_wd=RUN["start_wd"],
            end_wd=RUN["end_wd"],
            wd_incr_steps=RUN["steps"] * size,
            wd_incr_style="linear",
        )
        if not case["trained"]:
            return
        data = GPTDatasetConfig(
            random_seed=a["seed"],
            sequence_length=a["seq_length"],
            blend=([a["data_path"][0]], None),
            split=a["split"],
            path_to_cache=str(folder / "cache"),
            tokenizer=TOKENIZER,  # pyright: ignore[reportArgumentType]
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=False,
        )
        counts = [RUN["steps"] * size, 4, 4]
        self.data = BlendedMegatronDatasetBuilder(GPTDataset, counts, lambda: True, data).build()[0]

    @property
    def names(self) -> list[str]:
        """What a checkpoint calls the models."""
        return [f"model{i}" for i in range(len(self.models))] if len(self.models) > 1 else ["model"]

    def close(self) -> None:
        self._groups.__exit__(None, None, None)

    def step(self, number: int) -> float:
        """The global batch's loss at one step, counted from 0."""
        rank, ranks = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
        each = RUN["batch"] // ranks
        samples = [self.data[number * RUN["batch"] + rank * each + i] for i in range(each)]
        tokens, labels = (torch.stack([s[kind] for s in samples]) for kind in ("tokens", "labels"))
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        loss = logits_of(self.model, tokens.numpy(), labels=labels.long()).float().mean()
        loss.backward()
        self.model.finish_grad_sync()
        self.optimizer.step()
        self.scheduler.step(increment=RUN["batch"])
        total = loss.detach().clone()
        dist.all_reduce(total, group=parallel_state.get_data_parallel_group())
        return total.item() / ranks

    def state(self, layout: str, *, is_loading: bool = False) -> tuple[dict[str, Any], dict[str, Any]]:
        """What Megatron-LM's `generate_state_dict` makes of it, and the content's description."""
        content = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
        content |= {"distrib_optim_sharding_type": layout} if layout else {}
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        metadata = content | {"dp_cp_group": group}
        models = (one.module.sharded_state_dict(metadata=metadata) for one in self.models)
        model = dict(zip(self.names, models, strict=True))
        optimizer = self.optimizer.sharded_state_dict(model, is_loading, metadata=metadata)
        return model | {"optimizer": optimizer, "opt_param_scheduler": self.scheduler.state_dict()}, content

    @torch.no_grad()
    def fill_states(self) -> None:
        """Random moments and weights that round to the model's, the same on ranks that repeat a tensor."""
        rank = parallel_state.get_tensor_model_parallel_rank()
        for one in self.optimizer.chained_optimizers:
            one._init_optimizer_states_with_dummy_values()
            for ranges in one.gbuf_ranges:
                for buckets in ranges.values():
                    for bucket in buckets:
                        for parameter, places in bucket["param_map"].items():
                            whole = parameter.detach().float().flatten()
                            part = rank if getattr(parameter, "tensor_model_parallel", False) else 0
                            random = np.random.default_rng([part, zlib.crc32(whole.numpy().tobytes())])
                            at = slice(places["param"].start, places["param"].end)
                            near = whole * torch.from_numpy(1 + 1e-4 * random.random(len(whole))).float()
                            values = {"param": near if self.case["bf16"] else whole}
                            values |= {n: torch.from_numpy(random.random(len(whole))).float() for n in MOMENTS}
                            tensors = {name: value[at] for name, value in values.items()}
                            one._set_main_param_and_optimizer_states(parameter, tensors)
            for state in one.optimizer.state.values():
                state["step"] = torch.tensor(float(SAVED))
        self.scheduler.step(SAVED * RUN["batch"])

    def save(self, folder: Path, layout: str) -> None:
        """As Megatron-LM saves it."""
        tensor, pipeline, chunks, expert = self.case["degrees"]
        args = argparse.Namespace(
            **self.arguments,
            tensor_model_parallel_size=tensor,
            pipeline_model_parallel_size=pipeline,
            virtual_pipeline_model_parallel_size=chunks,
            expert_model_parallel_size=expert,
            params_dtype=self.dtype,
            bf16=self.case["bf16"],
            layernorm_epsilon=self.arguments["norm_epsilon"],
            world_size=dist.get_world_size(),
            consumed_train_samples=SAVED * RUN["batch"],
        )
        common = {"args": args, "checkpoint_version": 3.0, "iteration": SAVED}
        target = folder / f"iter_{SAVED:07}"
        if dist.get_rank() == 0:
            target.mkdir(parents=True)
            (folder / "latest_checkpointed_iteration.txt").write_text(str(SAVED))
        dist.barrier()
        if layout == "torch":
            rank = f"{parallel_state.get_tensor_model_parallel_rank():02}"
            rank += f"_{parallel_state.get_pipeline_model_parallel_rank():03}" if pipeline > 1 else ""
            rank += f"_{parallel_state.get_expert_model_parallel_rank():03}" if expert > 1 else ""
            path = target / f"mp_rank_{rank}"
            common |= {"optimizer": self.optimizer.state_dict(), "opt_param_scheduler": self.scheduler.state_dict()}
            if parallel_state.get_expert_data_parallel_rank() == 0:
                path.mkdir()
                models = [one.module.state_dict_for_save_checkpoint() for one in self.models]
                torch.save(common | dict(zip(self.names, models, strict=True)), path / "model_optim_rng.pt")
            self.optimizer.save_parameter_state(str(path / "distrib_optim.pt"))
            return
        state, content = self.state(layout)
        common["content_metadata"] = content
        dist_checkpointing.save(state | common, str(target), content_metadata=content)

    def load(self, folder: Path) -> int:
        """Loads what mtjax wrote, strictly; returns its iteration."""
        target = folder / f"iter_{int((folder / 'latest_checkpointed_iteration.txt').read_text()):07}"
        for optimizer in self.optimizer.chained_optimizers:
            optimizer._init_optimizer_states_with_dummy_values()
        state, _ = self.state("fully_reshardable", is_loading=True)
        state |= {"iteration": 0}
        loaded, missing, unexpected = dist_checkpointing.load(state, str(target), strict="return_all")
        unexpected = {key for key in unexpected if "rng_state" not in key}
        assert not missing and not unexpected, (missing, unexpected)
        if missing or unexpected:
            raise ValueError(f"{missing} {unexpected}")
        self.model.module.load_state_dict(loaded["model"])
        self.optimizer.load_state_dict(loaded["optimizer"])
        for optimizer in self.optimizer.chained_optimizers:
            for one in optimizer.optimizer.state.values():
                one["step"] = one["step"].clone()  # one tensor for all parameters, which each of them would count up
        self.scheduler.load_state_dict(loaded["opt_param_scheduler"])
        return loaded["iteration"]


def main(mode: str, folder: Path) -> None:
    """All cases."""
    init_ranks(folder / "saved" if mode == "train" else None)
    named = set(json.loads((folder / "cases.json").read_text())) if mode != "tiny" else {*TINY_RUN}
    for name, case in (RESUMED | TINY_RUN).items():
        if name not in named or (mode == "resume" and not (folder / "written" / name).exists()):
            continue
        run, first = Trained(folder, name), 0
        if mode == "resume":
            first = run.load(folder / "written" / name)
        losses = []
        if mode != "resume" and not case["trained"]:
            run.fill_states()
            for layout in case["layouts"]:
                run.save(folder / "saved" / name / layout, layout)
            run.close()
            continue
        for step in range(first, RUN["steps"]):
            if mode == "train" and step == SAVED:
                for layout in case["layouts"]:
                    run.save(folder / "saved" / name / (layout or "plain"), layout)
            losses.append(run.step(step))
        if dist.get_rank() == 0:
            np.savez(folder / f"{name}-{mode}.npz", loss=np.array(losses), first=first)
        run.close()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
