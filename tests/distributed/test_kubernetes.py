"""Manifests and progress for Kubernetes, by the models of Kubeflow: `make test-adapters`."""

import http.server
import importlib.util
import pathlib
import re
import ssl
import subprocess
import threading
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import functrain as ft

pytestmark = [
    pytest.mark.adapters,
    pytest.mark.skipif(
        importlib.util.find_spec("kubeflow_trainer_api") is None,
        reason="needs kubeflow-trainer-api",
    ),
]

ROOT = pathlib.Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "kubernetes"


def manifests(name: str) -> list[dict[str, Any]]:
    import yaml

    return list(yaml.safe_load_all((FOLDER / name).read_text()))


def model_of(manifest: dict[str, Any]) -> Any:
    from kubeflow_trainer_api import models

    group = {"jobset.x-k8s.io": "JobsetV1alpha2", "trainer.kubeflow.org": "TrainerV1alpha1"}
    return getattr(models, group[manifest["apiVersion"].split("/")[0]] + manifest["kind"])


@pytest.mark.parametrize("name", ["jobset.yaml", "trainjob.yaml"])
def test_each_manifest_has_only_fields_that_its_model_knows_with_values_that_it_takes(
    name: str,
) -> None:
    for manifest in manifests(name):
        # Unknown fields are dropped, and invalid values raise.
        assert model_of(manifest).from_dict(manifest).to_dict() == manifest


def test_a_field_that_is_misspelt_is_found() -> None:
    (manifest,) = manifests("jobset.yaml")
    manifest["spec"]["replicatedJobs"][0]["template"]["spec"]["backofLimit"] = 0
    assert model_of(manifest).from_dict(manifest).to_dict() != manifest


def test_kubeflow_starts_and_ends_processes_as_the_jobset_does() -> None:
    (jobset,), (runtime, train_job) = manifests("jobset.yaml"), manifests("trainjob.yaml")
    ours, theirs = jobset["spec"], runtime["spec"]["template"]["spec"]
    assert theirs["failurePolicy"] == ours["failurePolicy"]
    our_job, their_job = (spec["replicatedJobs"][0]["template"]["spec"] for spec in (ours, theirs))
    for name in ("backoffLimit", "podFailurePolicy"):
        assert their_job[name] == our_job[name]
    our_pod, their_pod = (job["template"]["spec"] for job in (our_job, their_job))
    for name in ("restartPolicy", "terminationGracePeriodSeconds"):
        assert their_pod[name] == our_pod[name]
    assert train_job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]


class StatusServer(http.server.BaseHTTPRequestHandler):
    """Keeps the tokens and bodies that are sent to it."""

    received: list[tuple[str, str]]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        self.received.append((self.headers["Authorization"], body))
        self.send_response(200)
        self.end_headers()


@pytest.fixture
def received(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[list[tuple[str, str]]]:
    """What a server of TLS receives, to which the variables of Kubeflow point."""
    key, certificate, token = (tmp_path / name for name in ("key", "certificate", "token"))
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    command = ["openssl", "req", "-x509", "-nodes", "-newkey", "rsa:2048", *names]
    files = ["-keyout", str(key), "-out", str(certificate)]
    subprocess.run([*command, *files], check=True, capture_output=True)
    token.write_text("secret")
    StatusServer.received = []
    server = http.server.HTTPServer(("localhost", 0), StatusServer)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    url = f"https://localhost:{server.server_address[1]}/status"
    for name, value in {"URL": url, "TOKEN": token, "CA_CERT": certificate}.items():
        monkeypatch.setenv(f"KUBEFLOW_TRAINER_SERVER_{name}", str(value))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield StatusServer.received
    server.shutdown()
    thread.join()
    server.server_close()


def fit_with_the_hook_of_the_page(epochs: int) -> None:
    page = (ROOT / "docs" / "devices.md").read_text()
    (code,) = (
        x for x in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "TRAINER_SERVER" in x
    )
    names: dict[str, Any] = {"ft": ft, "jax": jax}
    exec(code, names)
    names["EPOCHS"] = epochs

    def step(count: Any, batch: Any) -> Any:
        return count + 1, {"loss": jnp.sum(batch)}

    data, hooks = ft.ArrayLoader(jnp.ones(8), 2), [names["send_progress"]]
    ft.fit(0, step, data, epochs=epochs, hooks=hooks, verbose=0)


def test_the_hook_of_the_page_sends_what_the_status_server_of_kubeflow_reads(
    received: list[tuple[str, str]],
) -> None:
    from kubeflow_trainer_api.models import TrainerV1alpha1UpdateTrainJobStatusRequest as Request

    fit_with_the_hook_of_the_page(epochs=4)
    statuses = [Request.from_json(body).trainer_status for _, body in received]
    assert [status.progress_percentage for status in statuses] == [25, 50, 75, 100]
    assert [(x.name, x.value) for x in statuses[0].metrics] == [("loss", "2")]
    assert statuses[0].last_updated_time <= statuses[-1].last_updated_time
    assert {token for token, _ in received} == {"Bearer secret"}


def test_a_run_goes_on_where_the_status_server_does_not_answer(
    received: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_URL", "https://localhost:1/status")
    fit_with_the_hook_of_the_page(epochs=2)
    assert received == []
