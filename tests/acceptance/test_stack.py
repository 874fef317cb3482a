"""The files that run the stack say what the program knows: commands, settings, ports, paths, metrics."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from fastapi.testclient import TestClient

from regraft.cli import app
from service.http.app import create_app
from service.settings import Settings

ROOT = Path(__file__).parents[2]
COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
DOCKERFILE = (ROOT / "examples" / "Dockerfile").read_text()
FOLDER = ROOT / "examples" / "kubernetes"
KUSTOMIZATION = yaml.safe_load((FOLDER / "kustomization.yaml").read_text())
OBSERVABILITY = ROOT / "examples" / "observability"
OURS = {name: made for name, made in COMPOSE["services"].items() if "build" in made}
ENGINES = {"pgvector": {"vectors"}, "milvus": {"etcd", "minio", "milvus"}}


def manifests() -> Iterator[dict[str, Any]]:
    for name in KUSTOMIZATION["resources"]:
        yield from yaml.safe_load_all((FOLDER / name).read_text())


MANIFESTS = {(made["kind"], made["metadata"]["name"]): made for made in manifests()}
PODS = {name: made["spec"]["template"] for (kind, name), made in MANIFESTS.items() if kind == "Deployment"}
ALL_OF = {name: [*pod["spec"].get("initContainers", []), *pod["spec"]["containers"]] for name, pod in PODS.items()}
CONTAINERS = {name: pod["spec"]["containers"][0] for name, pod in PODS.items()}
CONFIG = MANIFESTS["ConfigMap", "regraft"]["data"]
SECRET = MANIFESTS["Secret", "regraft"]["stringData"]


def words() -> Iterator[list[str]]:
    """Every command of ours that some file runs."""
    for service in OURS.values():
        if "command" in service:
            yield service["command"]
    for containers in ALL_OF.values():
        yield from (container["command"] for container in containers)
    for line in re.findall(r"^CMD (.+)$", DOCKERFILE, re.MULTILINE):
        yield json.loads(line)


@pytest.mark.parametrize("command", list(words()), ids=" ".join)
def test_each_command_is_one_of_the_program(command: list[str]) -> None:
    program, name, *options = command

    assert program == "regraft"
    known = typer.main.get_group(app).commands[name]
    known.make_context(name, list(options), parent=typer.Context(known))


def test_each_variable_is_a_setting_and_each_value_legal() -> None:
    used = {*CONFIG, *SECRET, *re.findall(r"\b(REGRAFT_\w+)=", DOCKERFILE)}
    for service in OURS.values():
        used |= set(service["environment"])
    ours = {name.removeprefix("REGRAFT_").lower() for name in used if name.startswith("REGRAFT_")}

    assert ours <= set(Settings.model_fields)
    assert {name for name in used if not name.startswith(("REGRAFT_", "AWS_", "PYTHON"))} == set()
    values = {**CONFIG, **SECRET, "REGRAFT_API_KEY": "0123456789abcdef"}
    given = {name.removeprefix("REGRAFT_").lower(): value for name, value in values.items() if name[0] == "R"}
    assert Settings(**given).blobs_url.startswith("s3://")


def test_each_port_is_the_one_that_the_program_listens_on() -> None:
    port = str(Settings().port)

    assert CONFIG["REGRAFT_PORT"] == port
    assert OURS["api"]["ports"] == [f"127.0.0.1:{port}:{port}"]
    assert f"EXPOSE {port}" in DOCKERFILE
    (listening,) = CONTAINERS["regraft-api"]["ports"]
    assert str(listening["containerPort"]) == port
    assert MANIFESTS["Service", "regraft"]["spec"]["ports"][0]["targetPort"] == listening["name"]
    (job,) = yaml.safe_load((OBSERVABILITY / "prometheus.yml").read_text())["scrape_configs"]
    assert str(job["dns_sd_configs"][0]["port"]) == port
    assert job["dns_sd_configs"][0]["names"] == ["api"]


@pytest.fixture(scope="module")
def http(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    data = tmp_path_factory.mktemp("stack") / "data"
    with TestClient(create_app(Settings(data=data)), base_url="http://127.0.0.1") as made:
        made.post("/v1/galleries", json={"name": "g"})
        made.get("/v1/galleries/g")
        yield made


def test_each_path_that_is_asked_answers(http: TestClient) -> None:
    api, text = CONTAINERS["regraft-api"], (ROOT / "docker-compose.yml").read_text()
    asked = {api[probe]["httpGet"]["path"] for probe in ("startupProbe", "livenessProbe")}
    asked |= set(re.findall(r"'(/v1[\w/]+)'", " ".join(api["readinessProbe"]["exec"]["command"])))
    asked |= set(re.findall(r":8080(/v1[\w/]+)'", text))
    asked.add(PODS["regraft-api"]["metadata"]["annotations"]["prometheus.io/path"])
    asked.add(yaml.safe_load((OBSERVABILITY / "prometheus.yml").read_text())["scrape_configs"][0]["metrics_path"])

    assert asked == {"/v1/health", "/v1/health/ready", "/metrics"}
    assert {path: http.get(path).status_code for path in asked} == dict.fromkeys(asked, 200)


def test_each_metric_that_is_shown_or_scaled_by_is_told(http: TestClient) -> None:
    told = set(re.findall(r"^# TYPE (\w+)", http.get("/metrics").text, re.MULTILINE))
    shown = json.loads((OBSERVABILITY / "regraft.json").read_text())["panels"]
    used = {name for panel in shown for name in re.findall(r"regraft_\w+", panel["targets"][0]["expr"])}
    scaled = MANIFESTS["HorizontalPodAutoscaler", "regraft-worker"]["spec"]["metrics"]
    used |= {metric["external"]["metric"]["name"] for metric in scaled}

    assert {name for name in used if name.removesuffix("_bucket") not in told} == set()
    documented = set(re.findall(r"regraft_\w+", (ROOT / "docs/deployment.md").read_text()))
    own = {name for name in told if name.startswith("regraft_") and not name.endswith("_created")}
    assert {name.removesuffix("_bucket") for name in documented} == own


def test_compose_adds_by_profiles_and_what_runs_without_needs_a_key() -> None:
    by_profile: dict[str, set[str]] = {}
    for name, service in COMPOSE["services"].items():
        by_profile.setdefault(*[*service.get("profiles", ["default"]), set()][:2]).add(name)

    observed = {"prometheus", "grafana"}
    default = {"api", "worker", "database"}
    assert by_profile == {"default": default, "gpu": {"worker-gpu"}, "observability": observed, **ENGINES}
    for service in OURS.values():
        assert service["environment"]["REGRAFT_API_KEY"].startswith("${REGRAFT_API_KEY:?")
        assert service["environment"]["REGRAFT_DATABASE_URL"].startswith("postgresql+psycopg://")
        assert service["volumes"] == ["data:/data"]
    for name, service in COMPOSE["services"].items():
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", [])), name
        named = [volume.partition(":")[0] for volume in service.get("volumes", [])]
        assert all((ROOT / one).exists() if one.startswith(".") else one in COMPOSE["volumes"] for one in named), name
        assert set(service.get("depends_on", [])) <= set(COMPOSE["services"])


def test_no_password_is_one_that_everybody_knows() -> None:
    needed = "${POSTGRES_PASSWORD}"
    set_to = re.findall(r"PASSWORD: (.*)|SECRET_ACCESS_KEY: (.*)", (ROOT / "docker-compose.yml").read_text())

    for value in map("".join, set_to):
        assert re.fullmatch(r"\$\{\w+:\?.*\}", value) or value.endswith(f":-{needed}}}"), value
    assert SECRET["REGRAFT_API_KEY"] == ""  # which is refused


def test_pods_have_no_token_of_kubernetes() -> None:
    assert [pod["spec"]["automountServiceAccountToken"] for pod in PODS.values()] == [False, False]


def test_the_servers_of_engines_are_where_the_file_says_that_galleries_find_them() -> None:
    text = (ROOT / "docker-compose.yml").read_text()

    for variable, protocol in (("REGRAFT_PGVECTOR_URL", "postgresql+psycopg"), ("REGRAFT_MILVUS_URI", "http")):
        assert all(service["environment"][variable] == f"${{{variable}:-}}" for service in OURS.values())
        (host,) = re.findall(rf"# With the profile \w+: {re.escape(protocol)}://(?:\S+@)?(\w+):\d+", text)
        assert host in {*ENGINES["pgvector"], *ENGINES["milvus"]}
    assert Settings(milvus_uri="", pgvector_url="").milvus_uri == ""


def test_images_are_made_of_what_is_there_and_run_as_nobody_in_particular() -> None:
    for copied in re.findall(r"^COPY (?!--from)(.+) \S+$", DOCKERFILE, re.MULTILINE):
        assert all((ROOT / source).exists() for source in copied.split()), copied
    stages = re.findall(r"^FROM \S+ AS (\S+)$", DOCKERFILE, re.MULTILINE)
    assert {service["build"]["target"] for service in OURS.values()} == {"serving", "gpu"} < set(stages)
    for stage in re.split(r"^FROM ", DOCKERFILE, flags=re.MULTILINE)[1:]:
        assert "built" in stage.splitlines()[0] or "\nUSER 10001\n" in stage
    installed = re.findall(r'pip install .*"\.\[(.+)\]"', DOCKERFILE)
    assert len(installed) == 2
    for extras in installed:  # whatever settings may ask for
        assert {"postgres", "pgvector", "milvus", "s3", "arrow"} < set(extras.split(","))
    assert all(service["read_only"] and service["tmpfs"] == ["/tmp"] for service in OURS.values())


def test_a_migration_is_done_before_any_probe_can_end_it() -> None:
    first, *_ = ALL_OF["regraft-api"]

    assert first["command"] == ["regraft", "migrate"]
    assert first is not CONTAINERS["regraft-api"]
    assert not [field for field in first if "Probe" in field]


def test_manifests_fit_each_other() -> None:
    for name, pod in PODS.items():
        deployment = MANIFESTS["Deployment", name]["spec"]
        assert deployment["selector"]["matchLabels"] == pod["metadata"]["labels"]
        (budget,) = [made for (kind, _), made in MANIFESTS.items() if kind == "PodDisruptionBudget" and name in _]
        assert budget["spec"]["selector"]["matchLabels"] == pod["metadata"]["labels"]
        assert pod["spec"]["securityContext"]["runAsUser"] == 10001
        for container in ALL_OF[name]:
            assert {next(iter(source)): next(iter(source.values()))["name"] for source in container["envFrom"]} == {
                "configMapRef": "regraft",
                "secretRef": "regraft",
            }
            security = container["securityContext"]
            assert security["readOnlyRootFilesystem"]
            assert not security["allowPrivilegeEscalation"]
            assert {mount["mountPath"] for mount in container["volumeMounts"]} == {CONFIG["REGRAFT_DATA"], "/tmp"}
            mounted = {mount["name"] for mount in container["volumeMounts"]}
            assert mounted == {volume["name"] for volume in pod["spec"]["volumes"]}
            assert {"requests", "limits"} <= set(container["resources"])
            assert container["image"] == KUSTOMIZATION["images"][0]["name"]
    assert MANIFESTS["Service", "regraft"]["spec"]["selector"] == PODS["regraft-api"]["metadata"]["labels"]
    scaled = MANIFESTS["HorizontalPodAutoscaler", "regraft-worker"]["spec"]["scaleTargetRef"]
    assert (scaled["kind"], scaled["name"]) in MANIFESTS
