"""compose.yaml and deploy.yaml agree with the Dockerfiles and with what the programs read, and hold no secret."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from pydantic_settings import BaseSettings

from service.settings import Settings as ApiSettings
from tests.deployment import dockerfiles
from tests.deployment.dockerfiles import ROOT, Stage
from workers.settings import Settings as WorkerSettings

VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker/compose.yaml").read_text())
DEPLOY: list[dict[str, Any]] = list(yaml.safe_load_all((ROOT / "deploy.yaml").read_text()))
IMAGES: dict[str, tuple[Stage, type[BaseSettings]]] = {
    "tunery-api": (dockerfiles.read(ROOT / "docker/api.Dockerfile")[-1], ApiSettings),
    "tunery-worker-cpu": (dockerfiles.read(ROOT / "docker/worker-cpu.Dockerfile")[-1], WorkerSettings),
}


def pods() -> Iterator[tuple[str, dict[str, Any]]]:
    for document in DEPLOY:
        template = document.get("spec", {}).get("template")
        if template is not None:
            yield document["metadata"]["name"], template["spec"]


def find(kind: str, name: str) -> dict[str, Any]:
    (found,) = (d for d in DEPLOY if (d["kind"], d["metadata"]["name"]) == (kind, name))
    return found


def compose_environment(service: dict[str, Any]) -> dict[str, str]:
    return {name: str(value) for name, value in service.get("environment", {}).items()}


def pod_environment(container: dict[str, Any]) -> dict[str, str]:
    """Names with their values as written; what a Secret gives is the empty string."""
    found: dict[str, str] = {}
    for source in container.get("envFrom", []):
        found |= find("ConfigMap", source["configMapRef"]["name"])["data"]
    return found | {entry["name"]: entry.get("value", "") for entry in container["env"]}


#: Where, which image, and the environment that its program is given.
PROGRAMS = [
    *((f"compose-{name}", s["image"], compose_environment(s)) for name, s in COMPOSE["services"].items()),
    *((f"deploy-{name}", c["image"], pod_environment(c)) for name, pod in pods() for c in pod["containers"]),
]
each_program = pytest.mark.parametrize(
    ("image", "environment"), [(image, env) for _, image, env in PROGRAMS], ids=[where for where, _, _ in PROGRAMS]
)


@each_program
def test_images_are_of_a_version_that_is_named(image: str, environment: dict[str, str]) -> None:
    """No image floats: ours are of this version, the others of a release series."""
    name, _, tag = image.partition(":")
    if name in IMAGES:
        assert tag == VERSION
    else:
        assert re.fullmatch(r"\d+(\.\d+)*-[a-z]+", tag)


@each_program
def test_programs_know_every_setting_that_they_are_given(image: str, environment: dict[str, str]) -> None:
    """A TUNERY_ variable that no program reads is a misspelt one: it would be ignored in silence."""
    name = image.partition(":")[0]
    given = {variable for variable in environment if variable.startswith("TUNERY_")}
    if name not in IMAGES:
        assert not given
        return
    settings = IMAGES[name][1]
    assert given <= {f"TUNERY_{field.upper()}" for field in settings.model_fields}
    assert "TUNERY_DATABASE_URL" in given


@each_program
def test_no_password_is_written_down(image: str, environment: dict[str, str]) -> None:
    """Passwords come from docker/.env or a Secret: a start without them is refused, none has a default."""
    for name, value in environment.items():
        for password in re.findall(r"://[^:@/]*:([^@]+)@", value):
            assert re.fullmatch(r"\$\{[A-Z_]+:\?[^}]+\}|\$\([A-Z_]+\)", password), f"{name} holds a password"
        if "PASSWORD" in name or "AUTH" in name:
            assert re.fullmatch(r"|\$\{[A-Z_]+:\?[^}]+\}|\$\([A-Z_]+\)", value), f"{name} is written down"


def test_redis_asks_for_a_password_keeps_messages_and_never_drops_one() -> None:
    """Both manifests start Redis with a password, an append-only file, and refusal instead of eviction."""
    (pod,) = (pod for name, pod in pods() if name == "redis")
    for command in (COMPOSE["services"]["redis"]["command"], pod["containers"][0]["args"]):
        options = dict(zip(command[1::2], command[2::2], strict=True))
        assert "REDIS_PASSWORD" in options["--requirepass"]
        assert (options["--appendonly"], options["--maxmemory-policy"]) == ("yes", "noeviction")
        assert "--maxmemory" in options


def test_ports_are_those_that_the_api_image_listens_on() -> None:
    """Dockerfile, health check, Compose, container, probes and Service name one port."""
    final = IMAGES["tunery-api"][0]
    port = int(final.only("EXPOSE").rest)
    assert final.only("CMD").exec_form[-2:] == ["--port", str(port)]
    assert f":{port}/readyz" in final.only("HEALTHCHECK").rest
    # This version does not ask who calls: published to this host alone.
    assert COMPOSE["services"]["api"]["ports"] == [f"127.0.0.1:{port}:{port}"]
    container = find("Deployment", "api")["spec"]["template"]["spec"]["containers"][0]
    (declared,) = container["ports"]
    assert declared["containerPort"] == port
    assert find("Service", "api")["spec"]["ports"][0]["targetPort"] == declared["name"]
    assert container["readinessProbe"]["httpGet"] == {"path": "/readyz", "port": declared["name"]}
    assert container["livenessProbe"]["httpGet"] == {"path": "/healthz", "port": declared["name"]}


def test_every_address_in_a_url_is_a_service_that_exists() -> None:
    """Database and broker are looked for where they are: name and port of a Service, or of a Compose service."""
    for _, _, environment in PROGRAMS:
        for url in (v for n, v in environment.items() if n.startswith("TUNERY_") and n.endswith("_URL")):
            match = re.search(r"@([a-z-]+):(\d+)/", url)
            assert match, url
            host, port = match.groups()
            assert host in COMPOSE["services"]
            assert find("Service", host)["spec"]["ports"][0]["port"] == int(port)


def test_services_select_pods_that_exist() -> None:
    """Each Service's selector matches the pods of one workload."""
    labels = {
        d["metadata"]["name"]: d["spec"]["template"]["metadata"]["labels"]
        for d in DEPLOY
        if "template" in d.get("spec", {})
    }
    for service in (d for d in DEPLOY if d["kind"] == "Service"):
        matching = [n for n, ls in labels.items() if service["spec"]["selector"].items() <= ls.items()]
        assert matching == [service["metadata"]["name"]]


@pytest.mark.parametrize(("name", "pod"), list(pods()), ids=[name for name, _ in pods()])
def test_pods_hold_no_privilege(name: str, pod: dict[str, Any]) -> None:
    """No root, no writable image, no capability, no token of the cluster, no variables from other Services."""
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["automountServiceAccountToken"] is False
    assert pod["enableServiceLinks"] is False
    for container in pod["containers"]:
        context = container["securityContext"]
        assert context["readOnlyRootFilesystem"] is True
        assert context["allowPrivilegeEscalation"] is False
        assert context["capabilities"] == {"drop": ["ALL"]}
        if container["image"].startswith("tunery-"):
            user = IMAGES[container["image"].partition(":")[0]][0].only("USER").rest
            assert user == f"{pod['securityContext']['runAsUser']}:{pod['securityContext']['runAsGroup']}"


def test_the_worker_has_cores_of_its_own() -> None:
    """Whole CPUs, requests equal to limits, one pod a node: what the kubelet's static policy asks for."""
    pod = find("Deployment", "worker-cpu")["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    resources = container["resources"]
    assert resources["requests"] == resources["limits"]
    assert resources["limits"]["cpu"].isdigit()
    (rule,) = pod["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert rule["topologyKey"] == "kubernetes.io/hostname"


def test_api_and_workers_share_their_files() -> None:
    """Blobs lie in a folder: API and worker mount the same volume where TUNERY_DATA_DIR says."""
    claim = find("PersistentVolumeClaim", "tunery")
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    for name in ("api", "worker-cpu"):
        pod = find("Deployment", name)["spec"]["template"]["spec"]
        folder = pod_environment(pod["containers"][0])["TUNERY_DATA_DIR"]
        (mounted,) = (m["name"] for m in pod["containers"][0]["volumeMounts"] if m["mountPath"] == folder)
        (volume,) = (v for v in pod["volumes"] if v["name"] == mounted)
        assert volume["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
        assert f"tunery:{folder}" in COMPOSE["services"][name]["volumes"]
        image = COMPOSE["services"][name]["image"].partition(":")[0]
        assert f"TUNERY_DATA_DIR={folder}" in IMAGES[image][0].only("ENV").rest.split()
