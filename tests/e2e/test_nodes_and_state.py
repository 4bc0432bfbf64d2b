"""What is asked for is read as it is written, and what is wrong is named with the way out."""

import json
import os
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from e2e.cluster import providers, state
from e2e.cluster.bare import checks, images
from e2e.cluster.bare.network import Network
from e2e.cluster.nodes import MOST, parse
from e2e.cluster.problems import Refused
from e2e.cluster.reclaim import reclaim
from e2e.cluster.state import State


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path))
    return tmp_path


def test_classes_and_counts_become_named_nodes():
    nodes = parse("ondemand,spot:2,gpu@eval")
    assert [node.name for node in nodes] == ["ondemand-1", "spot-1", "spot-2", "gpu-1"]
    assert [node.workload for node in nodes] == ["control", "training", "training", "eval"]
    assert str(nodes[1].taints[0]) == "spot=true:NoSchedule"
    assert nodes[3].devices == {"nvidia.com/gpu": 1}


def test_new_nodes_are_named_after_those_that_are_there():
    assert [node.name for node in parse("spot:2", frozenset({"spot-1", "spot-3"}))] == ["spot-4", "spot-5"]


@pytest.mark.parametrize("wish", ["", "spots", "spot:x", "spot:-1", "ondemand;spot", "spot:"])
def test_what_is_no_node_class_is_refused_with_those_there_are(wish):
    with pytest.raises(Refused, match="ondemand, spot, gpu"):
        parse(wish)


def test_more_nodes_than_a_machine_holds_are_refused_with_another_way():
    with pytest.raises(Refused, match="kwok"):
        parse(f"spot:{MOST + 1}")


def test_two_clusters_get_networks_of_their_own_and_leave_those_in_use_alone():
    first = state.claim(state.folder_of("one"), taken={0})
    second = state.claim(state.folder_of("two"), taken={0, 2})
    assert (first.subnet, second.subnet) == (1, 3)


def test_a_cluster_that_exists_is_refused_with_the_way_to_remove_it():
    state.claim(state.folder_of("one"), taken=set())
    with pytest.raises(Refused, match="--name one down"):
        state.claim(state.folder_of("one"), taken=set())


def test_no_network_left_is_refused():
    with pytest.raises(Refused, match="in use"):
        state.claim(state.folder_of("one"), taken=set(range(256)))


@pytest.mark.parametrize("name", ["", "Dev", "a/b", "../x", "x" * 32, "9lives"])
def test_a_name_that_could_leave_its_folder_or_break_a_link_is_refused(name):
    with pytest.raises(Refused, match="cannot be a cluster's name"):
        state.folder_of(name)


def test_what_is_remembered_is_read_back(cache):
    known = state.claim(state.folder_of("one"), taken=set())
    for node in parse("ondemand,spot"):
        known.seat(node)
    known.save()
    again = State.read(known.folder)
    assert again == known
    assert again.seats == {"ondemand-1": 1, "spot-1": 2}


def test_there_is_no_cluster_says_how_to_make_one():
    with pytest.raises(Refused, match="--name nobody up"):
        providers.find("nobody")


def test_link_names_fit_the_kernel_for_any_cluster():
    network = Network("x" * 31, 255)
    assert len(network.cable(63).end) <= 15


def test_a_full_disk_is_named_before_anything_is_begun(cache, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1 << 30))
    with pytest.raises(Refused, match=r"1\.0 GiB free at .*needs 2"):
        checks.check_disk(cache / "clusters" / "one")
    assert not (cache / "clusters").exists()


def test_more_kubelets_than_the_kernel_lets_watch_files_are_refused_with_the_setting():
    with pytest.raises(Refused, match=r"sysctl fs\.inotify\.max_user_instances="):
        checks.check_watches(1_000_000)


def test_without_root_it_says_so_and_what_else_there_is(cache, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(Refused, match="needs root"):
        checks.check(cache)


def test_a_node_image_is_of_no_use_without_docker():
    with pytest.raises(Refused, match="node-image"):
        providers.choose("one", "bare", node_image="local:1")


class Cloud:
    """A cluster that only notes what became of it."""

    def __init__(self):
        self.kube = self
        self.nodes = {"spot-1": "Ready"}

    def run(self, verb, *arguments, timeout=0):
        self.nodes["spot-1"] += f", {verb}"

    def delete(self, node):
        self.nodes[node] += ", gone"


@pytest.mark.parametrize(("by", "seen"), [("taint", "Ready, taint, gone"), ("drain", "Ready, drain, gone")])
def test_a_reclaimed_node_is_told_first_and_gone_afterwards(by, seen):
    cloud = Cloud()
    reclaim(cloud, "spot-1", 0.1, by, say=lambda _: None)
    assert cloud.nodes["spot-1"] == seen


def test_the_state_is_json_that_a_person_can_read():
    known = state.claim(state.folder_of("one"), taken=set())
    assert json.loads((known.folder / "cluster.json").read_text())["subnet"] == known.subnet


def test_clusters_that_want_the_same_images_at_once_unpack_them_once(tmp_path):
    pantry, unpacked = tmp_path / "pantry" / "same", []

    def unpack():
        unpacked.append(pantry)
        time.sleep(0.2)
        pantry.mkdir()

    with ThreadPoolExecutor(3) as clusters:
        list(clusters.map(lambda _: images.provide(pantry, unpack), range(3)))
    assert unpacked == [pantry]


def test_what_could_not_be_unpacked_is_unpacked_by_the_next(tmp_path):
    pantry = tmp_path / "pantry" / "same"
    with pytest.raises(OSError, match="nowhere"):
        images.provide(pantry, (tmp_path / "nowhere" / "to").mkdir)
    images.provide(pantry, pantry.mkdir)
    assert pantry.is_dir()


def test_what_no_cluster_was_made_of_goes_when_something_else_is_unpacked(tmp_path):
    used, old, fresh = (tmp_path / "pantry" / name for name in ("used", "old", "fresh"))
    known = state.claim(state.folder_of("one"), taken=set())
    known.pantry = used.name
    known.save()
    for pantry in (used, old, fresh):
        images.provide(pantry, pantry.mkdir)
    assert {path.name for path in (tmp_path / "pantry").iterdir()} == {"used", "fresh"}
