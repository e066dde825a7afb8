"""The files in deploy/ fit the program: every flag, option, metric, label and path in them exists."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

import chairlift
from chairlift.cli.main import app
from chairlift.options import options_of, read_config_file
from chairlift.server.access import KeyLimits, KeySources
from chairlift.server.metrics import Metrics
from chairlift.server.options import ServerOptions
from chairlift.server.wire.limits import Limits
from chairlift.terminal.options import EngineOptions
from tests.tools import require_tool

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
SERVE_OPTIONS = tuple(option for group in (EngineOptions, ServerOptions) for option in options_of(group))
COMPOSE = [DEPLOY / "compose.yaml", DEPLOY / "compose.gpu.yaml"]
DOCKERFILE = (DEPLOY / "Dockerfile").read_text()
UNIT = DEPLOY / "systemd" / "chairlift.service"


def load(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def serve_flags() -> set[str]:
    import typer.main

    command = typer.main.get_command(app).commands["serve"]  # type: ignore[attr-defined]
    return {flag for parameter in command.params for flag in (*parameter.opts, *parameter.secondary_opts)}


def check_command(words: list[str]) -> None:
    """Check that a command is `serve` with flags that exist."""
    assert words[0] == "serve"
    flags = [word.split("=")[0] for word in words if word.startswith("-")]
    assert flags
    assert set(flags) <= serve_flags()


# ---- metrics ------------------------------------------------------------------------------------------------------


def shown_metrics() -> dict[str, set[str]]:
    """The labels of each series that /metrics can show."""
    metrics = Metrics("m")
    found: dict[str, set[str]] = {}
    for family in metrics.families():
        name = f"{family.name}_total" if family.type == "counter" else family.name
        own = metrics._registry._names_to_collectors[family.name]
        labels = set(own._labelnames)  # type: ignore[attr-defined]
        for suffix in ("_bucket", "_sum", "_count") if family.type == "histogram" else ("",):
            found[name + suffix] = labels | ({"le"} if suffix == "_bucket" else set())
    return found


def queries() -> list[str]:
    dashboard = json.loads((DEPLOY / "grafana" / "chairlift.json").read_text())
    found = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    found += [rule["expr"] for rule in alert_rules()]
    return [*found, dashboard["templating"]["list"][1]["query"]["query"]]


def alert_rules() -> list[dict[str, Any]]:
    return [rule for group in load(DEPLOY / "prometheus" / "alerts.yml")["groups"] for rule in group["rules"]]


@pytest.mark.parametrize("query", queries())
def test_a_query_uses_metrics_and_labels_that_exist(query: str) -> None:
    known = shown_metrics()
    used = set(re.findall(r"chairlift_\w+", query.replace('job="chairlift"', "")))
    assert used or query.startswith("up{")
    assert used <= known.keys()
    allowed = {"instance", "job"}.union(*(known[name] for name in used))
    for labels in re.findall(r"\bby \(([^)]*)\)", query):
        assert {label.strip() for label in labels.split(",")} <= allowed
    for selector in re.findall(r"\{([^}]*)\}", query):
        assert set(re.findall(r"(\w+)\s*=~?", selector)) <= allowed
    assert query.count("(") == query.count(")")


def test_the_dashboard_shows_most_of_the_metrics() -> None:
    shown = {
        re.sub(r"_(bucket|sum|count)$", "", name) for query in queries() for name in re.findall(r"chairlift_\w+", query)
    }
    all_of_them = {re.sub(r"_(bucket|sum|count)$", "", name) for name in shown_metrics()}
    assert len(shown & all_of_them) >= 0.6 * len(all_of_them)


def test_the_dashboard_is_well_formed() -> None:
    dashboard = json.loads((DEPLOY / "grafana" / "chairlift.json").read_text())
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert place["x"] + place["w"] <= 24
        assert not cells & taken, panel["title"]
        taken |= cells


def test_alerts_have_a_severity_and_a_summary() -> None:
    rules = alert_rules()
    assert len({rule["alert"] for rule in rules}) == len(rules)
    for rule in rules:
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert rule["annotations"]["summary"]
    if shutil.which("promtool"):
        subprocess.run(["promtool", "check", "rules", str(DEPLOY / "prometheus" / "alerts.yml")], check=True)


# ---- options ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", ["container.yaml", "chairlift.yaml"])
def test_config_files_have_options_that_exist(file: str) -> None:
    path = DEPLOY / "config" / file
    assert read_config_file(path, SERVE_OPTIONS)
    # Options that are commented out, too.
    names = {option.name for option in SERVE_OPTIONS}
    assert set(re.findall(r"^# (\w+): ", path.read_text(), re.MULTILINE)) <= names


def test_the_example_of_a_key_file_is_valid() -> None:
    keys = KeySources(file=DEPLOY / "config" / "keys.yaml").read()
    assert [key.name for key in keys] == ["alice", "batch-jobs"]
    assert keys[1].limits == KeyLimits(concurrent_requests=8)


def test_nginx_has_the_limits_of_the_servers() -> None:
    text = (DEPLOY / "nginx" / "chairlift.conf").read_text()
    (everywhere,) = re.findall(r"^    client_max_body_size (\d+)m;", text, re.MULTILINE)
    (uploads,) = re.findall(r"location = /v1/files \{\s+client_max_body_size (\d+)m;", text)
    limits = Limits()
    assert (int(everywhere) * 2**20, int(uploads) * 2**20) == (limits.max_body_bytes, limits.max_file_bytes)


def test_the_images_run_commands_that_exist() -> None:
    commands = re.findall(r"^CMD (\[.*\])$", DOCKERFILE, re.MULTILINE)
    assert len(commands) == 2
    for command in commands:
        check_command(json.loads(command))
    assert re.findall(r"^ENTRYPOINT (.*)$", DOCKERFILE, re.MULTILINE) == ['["chairlift"]'] * 2 + ["[]"]
    assert re.findall(r" AS (\w+)$", DOCKERFILE, re.MULTILINE) == ["wheel", "base", "cpu", "cuda", "ray"]
    health = json.loads(re.findall(r"^    CMD (\[.*\])$", DOCKERFILE, re.MULTILINE)[0])
    compile(health[2], "healthcheck", "exec")


def test_the_images_copy_files_that_exist_and_are_not_ignored() -> None:
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = [word for line in re.findall(r"^COPY (.*) \S+$", DOCKERFILE, re.MULTILINE) for word in line.split()]
    assert copied
    for name in copied:
        assert (ROOT / name).exists()
        assert name in allowed


@pytest.mark.parametrize("file", COMPOSE, ids=lambda path: path.name)
def test_compose_files_mount_files_that_exist(file: Path) -> None:
    services, volumes = load(file)["services"], load(file).get("volumes", {})
    for service in services.values():
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            assert source in volumes or (file.parent / source).exists(), source
        if "command" in service:
            check_command(service["command"])
        if "build" in service:
            assert (file.parent / service["build"]["context"] / service["build"]["dockerfile"]).exists()
    variables = re.findall(r"\bCHAIRLIFT_[A-Z_]+(?=:)", file.read_text())
    known = {option.variable for option in SERVE_OPTIONS}
    assert {name for name in variables if name != "CHAIRLIFT_VARIANT"} <= known


def test_prometheus_and_grafana_find_each_other() -> None:
    services = load(DEPLOY / "compose.yaml")["services"]
    scraped = load(DEPLOY / "prometheus" / "prometheus.yml")
    assert scraped["rule_files"] == ["alerts.yml"]
    assert scraped["scrape_configs"][0]["static_configs"][0]["targets"] == ["chairlift:8000"]
    assert {"chairlift", "prometheus", "grafana"} <= services.keys()
    provisioning = DEPLOY / "grafana" / "provisioning"
    assert load(provisioning / "datasources" / "prometheus.yml")["datasources"][0]["url"] == "http://prometheus:9090"
    folder = load(provisioning / "dashboards" / "chairlift.yml")["providers"][0]["options"]["path"]
    assert any(f":{folder}/chairlift.json" in volume for volume in services["grafana"]["volumes"])


def test_the_systemd_unit_is_valid(tmp_path: Path) -> None:
    text = UNIT.read_text()
    (command,) = re.findall(r"^ExecStart=\S+/chairlift (.*)$", text, re.MULTILINE)
    check_command(command.split())
    # The program and the user of the unit are not on this machine.
    local = tmp_path / "chairlift.service"
    local.write_text(text.replace("/opt/chairlift/bin/chairlift", "/bin/true").replace("User=chairlift", "User=root"))
    tool = require_tool("systemd-analyze")
    done = subprocess.run([tool, "verify", "--man=no", str(local)], capture_output=True, text=True, check=False)
    assert "chairlift.service" not in done.stderr, done.stderr


# ---- Kubernetes ---------------------------------------------------------------------------------------------------


def manifests(name: str) -> dict[str, Any]:
    """The objects of a file by their kind."""
    found = list(yaml.safe_load_all((DEPLOY / "kubernetes" / name).read_text()))
    assert len({one["kind"] for one in found}) == len(found)
    return {one["kind"]: one for one in found}


def pod_templates(objects: dict[str, Any]) -> list[dict[str, Any]]:
    if "Deployment" in objects:
        return [objects["Deployment"]["spec"]["template"]]
    cluster = objects["RayService"]["spec"]["rayClusterConfig"]
    return [cluster["headGroupSpec"]["template"], *(group["template"] for group in cluster["workerGroupSpecs"])]


@pytest.mark.parametrize("file", ["servers.yaml", "rayservice.yaml"])
def test_kubernetes_objects_refer_to_each_other(file: str) -> None:
    objects = manifests(file)
    templates = pod_templates(objects)
    service = objects["Service"]["spec"]
    (selected,) = [one for one in templates if one.get("metadata", {}).get("labels") == service["selector"]]
    (container,) = selected["spec"]["containers"]
    assert service["ports"][0]["targetPort"] in {port["name"] for port in container["ports"]}
    targets = set(re.findall(r" AS (\w+)$", DOCKERFILE, re.MULTILINE))
    for template in templates:
        volumes = {volume["name"] for volume in template["spec"].get("volumes", ())}
        for one in template["spec"]["containers"]:
            assert one["image"].removeprefix("chairlift:") in targets
            assert {mount["name"] for mount in one.get("volumeMounts", ())} <= volumes
            secret = one["env"][0]["valueFrom"]["secretKeyRef"]
            assert secret["name"] == objects["Secret"]["metadata"]["name"]
            assert secret["key"] in objects["Secret"]["stringData"]


def test_the_kubernetes_deployment_runs_a_command_that_exists() -> None:
    objects = manifests("servers.yaml")
    spec = objects["Deployment"]["spec"]
    assert spec["selector"]["matchLabels"] == spec["template"]["metadata"]["labels"]
    assert objects["PodDisruptionBudget"]["spec"]["selector"] == spec["selector"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    check_command(container["args"])
    paths = {container[probe]["httpGet"]["path"] for probe in ("startupProbe", "readinessProbe", "livenessProbe")}
    assert paths == {"/ready", "/health"}
    assert pod["terminationGracePeriodSeconds"] > ServerOptions().drain_timeout + 5


def test_the_ray_service_runs_an_application_that_can_be_built() -> None:
    pytest.importorskip("ray", reason="needs Ray: pip install 'chairlift[ray]'")
    from ray.serve.schema import ServeDeploySchema

    from chairlift.cluster import build_app

    spec = manifests("rayservice.yaml")["RayService"]["spec"]
    (application,) = ServeDeploySchema(**yaml.safe_load(spec["serveConfigV2"])).applications
    module, name = application.import_path.split(":")
    assert (module, name) == (build_app.__module__, build_app.__name__)
    assert build_app(application.args) is not None
    head, group = pod_templates(manifests("rayservice.yaml"))
    ports = {port["name"]: port["containerPort"] for port in head["spec"]["containers"][0]["ports"]}
    assert ports["http"] == application.args["port"]
    limits = group["spec"]["containers"][0]["resources"]["limits"]
    assert float(limits["nvidia.com/gpu"]) == application.args["replica_gpus"]
    assert float(limits["cpu"]) >= application.args["replica_cpus"]
    (workers,) = spec["rayClusterConfig"]["workerGroupSpecs"]
    assert workers["minReplicas"] == application.args["replicas"]
    assert workers["maxReplicas"] == application.args["max_replicas"]


# ---- packaging ----------------------------------------------------------------------------------------------------


def test_the_version_is_in_one_place() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["project"]["dynamic"] == ["version"]
    assert "version" not in project["project"]
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "chairlift.__version__"}
    assert re.fullmatch(r"\d+\.\d+\.\d+", chairlift.__version__)


def test_the_wheel_has_every_file_that_is_not_code() -> None:
    """Data files that git knows below the package must match a pattern of package-data."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["package-data"]["chairlift"]
    package = ROOT / "src" / "chairlift"
    listed = {path for pattern in patterns for path in package.glob(pattern)}
    data = {
        path
        for path in package.rglob("*")
        if path.is_file() and path.suffix not in (".py", ".pyc") and "__pycache__" not in path.parts
    }
    assert data - listed == set()
