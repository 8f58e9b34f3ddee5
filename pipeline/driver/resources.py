"""The resources of a Ray cluster, and the engines' share of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import ray

from pipeline.config import Job
from pipeline.records import RunError


@dataclass(frozen=True)
class ClusterResources:
    """Totals of a cluster, and Ray's resources of each of its machines that are alive."""

    cpus: float
    gpus: float
    object_store_bytes: float
    machines: list[dict[str, float]]

    @classmethod
    def current(cls) -> ClusterResources:
        """The resources of the cluster that this process is connected to."""
        total = ray.cluster_resources()
        return cls(
            cpus=total.get("CPU", 0),
            gpus=total.get("GPU", 0),
            object_store_bytes=total["object_store_memory"],
            machines=[node["Resources"] for node in ray.nodes() if node["Alive"]],
        )

    def most_per_machine(self, resource: str) -> float:
        """The largest amount of a resource that a single machine has."""
        return max(machine.get(resource, 0) for machine in self.machines)


@dataclass(frozen=True)
class EngineResources:
    """How many engines run, and the resources of each of their ranks.

    On a cluster with GPUs, a rank has GPUs of its own. Without GPUs, the ranks share three quarters
    of a machine's cores equally and the other cores decode videos: threads of an engine that share
    cores with a decoder slow each other down tenfold.

    Raises:
        RunError: the cluster is too small for the job.
    """

    job: Job
    cluster: ClusterResources

    def __post_init__(self) -> None:
        if self.cluster.cpus < 2:
            raise RunError(
                "the cluster has fewer than 2 CPUs; an engine and a decoder need one each"
            )
        if self.device == "cuda":
            self._check_gpus()

    def _check_gpus(self) -> None:
        most = self.cluster.most_per_machine("GPU")
        for name in ("pipeline_parallel_size", "tensor_parallel_size"):
            gpus = getattr(self.job, name)
            if gpus > most:
                flag = "--" + name.replace("_", "-")
                raise RunError(
                    f"{flag} is {gpus}: no machine of the cluster has more than {most:g} GPUs"
                )
        cpus_needed = self.engines * self.job.tensor_parallel_size + 1  # per rank, and a decoder
        if self.cluster.cpus < cpus_needed:
            raise RunError(
                f"{self.engines} engines and a decoder need {cpus_needed} CPUs; "
                f"the cluster has {self.cluster.cpus:g}"
            )

    @property
    def device(self) -> Literal["cpu", "cuda"]:
        """What the engines run on."""
        return "cuda" if self.cluster.gpus >= 1 else "cpu"

    @property
    def engines(self) -> int:
        """Engines that run side by side."""
        if self.job.concurrency:
            return self.job.concurrency
        if self.device == "cpu":
            return 1
        gpus_per_engine = self.job.tensor_parallel_size * self.job.pipeline_parallel_size
        return int(
            sum(machine.get("GPU", 0) // gpus_per_engine for machine in self.cluster.machines)
        )

    @property
    def max_frame_bytes(self) -> int:
        """Limit of the frames that are decoding or kept."""
        return self.job.max_bytes_in_flight or int(self.cluster.object_store_bytes / 4)

    @property
    def actor_options(self) -> dict[str, Any]:
        """Ray's options of a rank's actor."""
        if self.device == "cuda":
            return {"num_gpus": self.job.pipeline_parallel_size, "num_cpus": 1}
        cores = self._cores_per_rank
        # Ray accepts fractions of a CPU below 1 only
        return {"num_cpus": int(cores) if cores >= 1 else round(cores, 4)}

    @property
    def loader_settings(self) -> dict[str, Any]:
        """Arguments of a rank's loader that are the same for all engines."""
        settings: dict[str, Any] = {
            "device": self.device,
            "dtype": self.job.dtype,
            "strict": self.job.strict,
            "pipeline_parallel_size": self.job.pipeline_parallel_size,
            "tensor_parallel_size": self.job.tensor_parallel_size,
        }
        if self.device == "cpu":
            settings["threads"] = max(1, int(self._cores_per_rank))
        return settings

    @property
    def _cores_per_rank(self) -> float:
        cores = int(self.cluster.most_per_machine("CPU"))
        engine_cores = cores - max(1, cores // 4)
        engines_per_machine = -(-self.engines // len(self.cluster.machines))
        return engine_cores / engines_per_machine / self.job.tensor_parallel_size
