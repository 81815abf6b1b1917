"""The cluster files pass Ray's own validation, and say what they must."""

import copy
import re
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent
AWS, OWN = ROOT / "cluster.yaml", ROOT / "clusters" / "own.yaml"
ALL = [AWS, *sorted(path for path in (ROOT / "clusters").iterdir())]
ELSEWHERE = re.compile(r"(^|[\s\"'=:])/(home(?!/ray/)|root|work|Users|mnt|data)\b")
both = pytest.mark.parametrize("path", [AWS, OWN], ids=lambda path: path.name)


def read(path):
    return yaml.safe_load(path.read_text())


def validate(content):
    from ray.autoscaler._private.util import prepare_config, validate_config

    validate_config(prepare_config(copy.deepcopy(content)))


def commands(content, kind):
    """The lines that a machine runs, in order."""
    names = {
        "setup": ("initialization_commands", "setup_commands"),
        "start": ("head_start_ray_commands", "worker_start_ray_commands"),
    }[kind]
    return [line for name in names for line in content.get(name, [])]


@both
def test_rays_validation_passes_and_refuses_misspelt_keys(path):
    validate(read(path))
    with pytest.raises(Exception, match="setup_comands"):
        validate({**read(path), "setup_comands": []})


def test_rays_validation_refuses_node_types_that_do_not_agree():
    content = read(AWS)
    content["available_node_types"]["gpu"]["max_worker"] = 1
    with pytest.raises(Exception, match="max_worker"):
        validate(content)
    with pytest.raises(Exception, match="head_node_type"):
        validate({**read(AWS), "head_node_type": "heads"})


@both
def test_every_node_and_driver_shows_the_token_and_nothing_listens_by_request(path):
    content = read(path)
    starts = [line for line in commands(content, "start") if "ray start" in line]
    assert len(starts) == 2 and all("RAY_AUTH_MODE=token" in line for line in starts)
    assert "--dashboard-host=127.0.0.1" in starts[0]
    assert content["file_mounts"]["~/.ray/auth_token"] == "~/.ray/auth_token"
    assert "export RAY_AUTH_MODE=token" in " ".join(content["setup_commands"])  # `ray exec`
    assert all("0.0.0.0" not in line and "--num-gpus" not in line for line in starts)
    assert "ray get-auth-token --generate" in path.read_text()


@both
def test_what_is_installed_is_pinned_and_is_this_project(path):
    import ray

    content = read(path)
    assert content["file_mounts"]["~/fedscale"] == "."
    assert {".git", ".venv", "results"} <= set(content["rsync_exclude"])
    install = [line for line in content["setup_commands"] if " pip install " in line]
    assert len(install) == 1 and install[0].startswith("cd ~/fedscale && python -m pip install")
    assert "-c constraints.txt" in install[0] and install[0].endswith("-e .")
    for package in re.findall(r" ([a-z0-9]+(?:[=<>!~]\S+)?)(?= )", install[0].split("txt")[1]):
        assert "==" in package, package
    assert f'"{ray.__version__}"' in " ".join(content["setup_commands"])


@both
def test_records_have_one_place_that_all_machines_reach(path):
    places = re.findall(r"FEDSCALE_RESULTS=(\S+?)'", " ".join(read(path)["setup_commands"]))
    assert len(places) == 1 and "://" in places[0]
    assert any(word in places[0] for word in ("YOUR-BUCKET", "SHARED-DISK"))  # to be filled in


@both
def test_every_command_is_valid_bash(path):
    for line in commands(read(path), "setup") + commands(read(path), "start"):
        subprocess.run(["bash", "-n", "-c", line], check=True)


def test_the_aws_file_is_an_idle_head_and_spot_workers_within_limits():
    content = read(AWS)
    head, gpu = content["available_node_types"]["head"], content["available_node_types"]["gpu"]
    assert content["head_node_type"] == "head" and head["max_workers"] == 0
    assert head["resources"] == {"CPU": 0, "GPU": 0}
    assert "InstanceMarketOptions" not in head["node_config"]
    assert gpu["node_config"]["InstanceMarketOptions"]["MarketType"] == "spot"
    assert gpu["resources"] == {"CPU": 4, "GPU": 1}
    assert 0 < gpu["max_workers"] <= content["max_workers"] and gpu["min_workers"] == 0
    assert content["idle_timeout_minutes"] > 0
    profiles = [kind["node_config"]["IamInstanceProfile"]["Name"] for kind in (head, gpu)]
    assert profiles == ["fedscale-head", "fedscale-worker"]  # workers may not start machines


def test_a_run_of_the_paper_fits_within_the_limits_of_the_aws_file():
    from fedscale.presets import preset
    from fedscale.room import Machine, fit

    kinds = read(AWS)["available_node_types"].values()
    machines = [
        Machine(kind["resources"]["CPU"], kind["resources"]["GPU"])
        for kind in kinds
        for _ in range(max(1, kind["max_workers"]))
    ]
    assert fit(preset("dfrost", "paper", workers=4), machines) == 1.0
    quarters = preset("dfrost", "paper", workers=4, gpus_per_worker="0.25")
    assert fit(quarters, [Machine(0), Machine(4, 1)]) == 0.25  # one machine holds the whole run


def test_the_autoscaler_of_own_machines_is_the_one_that_starts_them():
    head = read(OWN)["head_start_ray_commands"][-1]
    assert "RAY_enable_autoscaler_v2=0" in head.split("ray start")[0]


@pytest.mark.parametrize("path", ALL, ids=lambda path: path.name)
def test_no_path_of_one_machine_and_no_secret(path):
    for line in path.read_text().splitlines():
        assert not ELSEWHERE.search(line), line
        assert not re.search(r"[A-Z0-9]{16,}|[0-9a-f]{32,}", line), line


def test_the_slurm_script_is_valid_bash_and_the_job_names_this_version():
    import ray

    subprocess.run(["bash", "-n", str(ROOT / "clusters" / "slurm.sh")], check=True)
    cluster = read(ROOT / "clusters" / "kuberay.yaml")["spec"]["rayClusterSpec"]
    assert cluster["rayVersion"] == ray.__version__ and cluster["authOptions"]["mode"] == "token"
    image = (ROOT / "clusters" / "Dockerfile").read_text()
    assert f"rayproject/ray:{ray.__version__}-" in image and "-c constraints.txt" in image
