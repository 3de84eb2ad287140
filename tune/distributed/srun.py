"""Environment variables of torch.distributed for tasks of SLURM's `srun`."""

import re

FIRST_PORT, PORTS = 20000, 12000  # below the range of outgoing connections


def join_step(environment: dict[str, str]) -> dict[str, str]:
    """Return RANK, WORLD_SIZE etc. from SLURM's variables for a task of `srun`. The result is empty for any other
    process, such as a batch script or a shell of `salloc`, even if its job has many tasks."""
    in_a_step = "SLURM_STEP_ID" in environment or "SLURM_JOB_ID" not in environment
    if "SLURM_PROCID" not in environment or not in_a_step:
        return {}
    job, step = (int(environment.get(name, 0)) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    return {
        "RANK": environment["SLURM_PROCID"],
        "LOCAL_RANK": environment["SLURM_LOCALID"],
        "WORLD_SIZE": environment.get("SLURM_STEP_NUM_TASKS") or environment["SLURM_NTASKS"],
        "MASTER_ADDR": first_node(environment.get("SLURM_STEP_NODELIST") or environment["SLURM_NODELIST"]),
        "MASTER_PORT": str(FIRST_PORT + (job * 10 + step) % PORTS),  # the same for all tasks of a step
    }


def first_node(nodes: str) -> str:
    """Return the first node of SLURM's list: gpu007 for `gpu[007-009,012],login1`."""
    return re.sub(r"\[([^],-]+)[^]]*\]", r"\1", nodes).split(",")[0]
