"""Manifests for Kubernetes, against the models of Kubeflow Trainer: `make test-adapters`."""

import importlib.util
import pathlib
from typing import Any

import pytest

pytestmark = [
    pytest.mark.adapters,
    pytest.mark.skipif(
        importlib.util.find_spec("kubeflow_trainer_api") is None,
        reason="needs kubeflow-trainer-api",
    ),
]

FOLDER = pathlib.Path(__file__).parents[2] / "examples" / "kubernetes"


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
