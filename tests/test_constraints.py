"""The pinned versions can be installed together, here and on a cluster's machines."""

import re
from importlib import metadata
from pathlib import Path

import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent


def pins():
    """The version of each package that constraints.txt allows for this Python."""
    lines = [line.split("#")[0].strip() for line in (ROOT / "constraints.txt").open()]
    asked = [Requirement(line) for line in lines if line]
    assert all(str(pin.specifier).startswith("==") for pin in asked)
    return {
        canonicalize_name(pin.name): str(pin.specifier).removeprefix("==")
        for pin in asked
        if pin.marker is None or pin.marker.evaluate()
    }


def test_no_package_refuses_a_version_that_is_pinned():
    pinned, refused = pins(), []
    for package in metadata.distributions():
        name = canonicalize_name(package.name)
        if pinned.get(name) != package.version:
            continue
        for text in package.requires or ():
            needs = Requirement(text)
            other = pinned.get(canonicalize_name(needs.name))
            wanted = needs.marker is None or needs.marker.evaluate({"extra": ""})
            if wanted and other and not needs.specifier.contains(other, prereleases=True):
                refused.append(f"{name} needs {needs}, pinned is {other}")
    assert not refused


def test_what_a_cluster_installs_is_among_the_pins():
    commands = yaml.safe_load((ROOT / "cluster.yaml").read_text())["setup_commands"]
    asked = re.findall(r"([a-z0-9_.-]+)==([^ ]+)", next(c for c in commands if "pip install" in c))
    assert asked and all(pins()[canonicalize_name(name)] == version for name, version in asked)
