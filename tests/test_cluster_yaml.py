"""The cluster files pass Ray's own validation, and say what they must."""

from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent
FILES = [ROOT / "cluster.yaml", ROOT / "clusters" / "own.yaml"]


def read(path):
    return yaml.safe_load(path.read_text())


def validate(content):
    from ray.autoscaler._private.util import prepare_config, validate_config

    validate_config(prepare_config(content))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_rays_validation_passes_and_refuses_misspelt_keys(path):
    validate(read(path))
    with pytest.raises(Exception, match="setup_comands"):
        validate({**read(path), "setup_comands": []})


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_start_command_asks_for_the_token_and_stays_local(path):
    content = read(path)
    starts = content["head_start_ray_commands"] + content["worker_start_ray_commands"]
    starts = [line for line in starts if "ray start" in line]
    assert len(starts) == 2 and all("RAY_AUTH_MODE=token" in line for line in starts)
    assert "--dashboard-host=127.0.0.1" in starts[0]
    assert "~/.ray/auth_token" in content["file_mounts"]
    assert all("0.0.0.0" not in line and "--num-gpus" not in line for line in starts)


def test_the_aws_file_is_an_idle_head_and_spot_workers_within_limits():
    content = read(FILES[0])
    head, gpu = content["available_node_types"]["head"], content["available_node_types"]["gpu"]
    assert content["head_node_type"] == "head" and head["max_workers"] == 0
    assert "InstanceMarketOptions" not in head["node_config"]
    assert gpu["node_config"]["InstanceMarketOptions"]["MarketType"] == "spot"
    assert gpu["resources"]["GPU"] == 1 and gpu["max_workers"] <= content["max_workers"]
    install = " ".join(content["setup_commands"])
    assert "constraints.txt" in install
    import ray

    assert f'"{ray.__version__}"' in install


@pytest.mark.parametrize("path", [*FILES, *sorted((ROOT / "clusters").glob("*"))], ids=str)
def test_no_absolute_path_of_a_machine(path):
    for line in path.read_text().splitlines():
        assert "/work/" not in line and "/root" not in line


def test_the_slurm_script_is_valid_bash_and_the_job_valid_yaml():
    import subprocess

    subprocess.run(["bash", "-n", str(ROOT / "clusters" / "slurm.sh")], check=True)
    job = read(ROOT / "clusters" / "kuberay.yaml")
    assert job["spec"]["rayClusterSpec"]["rayVersion"] == "2.60.0"
