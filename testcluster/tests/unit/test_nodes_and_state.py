"""Parsing of node classes, the state on disk, locks, host checks, reclamation, and image stores."""

import json
import os
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from testcluster import cluster_state, providers
from testcluster.cluster_state import State
from testcluster.errors import UsageError
from testcluster.linux_namespaces import checks, image_store
from testcluster.linux_namespaces.network import Network
from testcluster.nodes import MAX_NODES, parse
from testcluster.reclaim import reclaim


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path))
    return tmp_path


def test_parse_returns_named_nodes():
    nodes = parse("ondemand,spot:2,gpu@eval")
    assert [node.name for node in nodes] == ["ondemand-1", "spot-1", "spot-2", "gpu-1"]
    assert [node.workload for node in nodes] == [
        "control",
        "training",
        "training",
        "eval",
    ]
    assert str(nodes[1].taints[0]) == "spot=true:NoSchedule"
    assert nodes[3].devices == {"nvidia.com/gpu": 1}


def test_new_nodes_get_unused_names():
    assert [node.name for node in parse("spot:2", frozenset({"spot-1", "spot-3"}))] == [
        "spot-4",
        "spot-5",
    ]


@pytest.mark.parametrize(
    "classes",
    [
        "",
        "spots",
        "spot:x",
        "spot:-1",
        "ondemand;spot",
        "spot:",
        "spot@-",
        f"spot:{'9' * 5000}",
    ],
)
def test_unknown_class_is_refused_with_the_known_ones(classes):
    with pytest.raises(UsageError, match="ondemand, spot, gpu"):
        parse(classes)


def test_too_many_nodes_are_refused_with_kwok():
    with pytest.raises(UsageError, match="kwok"):
        parse(f"spot:{MAX_NODES + 1}")
    with pytest.raises(UsageError, match="kwok"):
        parse("spot:999999999,spot")


def test_clusters_get_distinct_unused_subnets():
    first = cluster_state.create(cluster_state.folder_of("one"), taken={0})
    second = cluster_state.create(cluster_state.folder_of("two"), taken={0, 2})
    assert (first.subnet, second.subnet) == (1, 3)


def test_existing_cluster_is_refused_with_the_down_command():
    cluster_state.create(cluster_state.folder_of("one"), taken=set())
    with pytest.raises(UsageError, match="--name one down"):
        cluster_state.create(cluster_state.folder_of("one"), taken=set())


def test_no_free_subnet_is_refused():
    with pytest.raises(UsageError, match="in use"):
        cluster_state.create(cluster_state.folder_of("one"), taken=set(range(256)))


@pytest.mark.parametrize("name", ["", "Dev", "a/b", "../x", "x" * 32, "9lives"])
def test_invalid_cluster_name_is_refused(name):
    with pytest.raises(UsageError, match="not a valid cluster name"):
        cluster_state.folder_of(name)


def test_state_survives_save_and_read(cache):
    saved = cluster_state.create(cluster_state.folder_of("one"), taken=set())
    for node in parse("ondemand,spot"):
        saved.assign_index(node)
    saved.save()
    read = State.read(saved.folder)
    assert read == saved
    assert read.indexes == {"ondemand-1": 1, "spot-1": 2}


def test_missing_cluster_is_refused_with_the_up_command():
    with pytest.raises(UsageError, match="--name missing up"):
        providers.find("missing")


def test_link_names_fit_the_kernel_limit():
    network = Network(cluster_state.mark(Path("/a/long/way") / ("x" * 31)), 255)
    assert len(network.veth_pair(63).end) <= 15


def test_full_disk_is_refused_before_creation(cache, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1 << 30))
    with pytest.raises(UsageError, match=r"1\.0 GiB free at .*needs 2"):
        checks.check_disk(cache / "clusters" / "one")
    assert not (cache / "clusters").exists()


def test_exceeded_inotify_limit_is_refused_with_the_sysctl():
    with pytest.raises(UsageError, match=r"sysctl fs\.inotify\.max_user_instances="):
        checks.check_inotify(1_000_000)


def test_process_that_ends_while_it_is_counted_has_no_inotify(tmp_path):
    (tmp_path / "7").mkdir()  # its fd folder is gone
    assert checks._inotify_instances(tmp_path / "7") == 0


def test_missing_root_is_refused(cache, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(UsageError, match="needs root"):
        checks.check(cache)


def test_node_image_is_refused_without_docker():
    with pytest.raises(UsageError, match="node-image"):
        providers.choose("one", "linux-namespaces", node_image="local:1")


class FakeCluster:
    """A cluster that records what happens to its only node; `uids` are the uids of the next observations."""

    def __init__(self):
        self.kube = self
        self.history = {"spot-1": "Ready"}
        self.uids = [["1"], ["1"]]

    def find_nodes(self, node):
        return [
            {"metadata": {"name": f"{node}-here", "uid": uid}}
            for uid in self.uids.pop(0)
        ]

    def run(self, verb, *arguments, timeout=0):
        self.history["spot-1"] += f", {verb}"

    def delete(self, node):
        self.history[node] += ", deleted"


@pytest.mark.parametrize(
    ("by", "history"),
    [("taint", "Ready, taint, deleted"), ("drain", "Ready, drain, deleted")],
)
def test_reclaim_gives_notice_before_deletion(by, history):
    cluster: Any = FakeCluster()
    reclaim(cluster, "spot-1", 0.1, by, report=lambda _: None)
    assert cluster.history["spot-1"] == history


def test_reclaim_leaves_a_replaced_machine_alone():
    cluster: Any = FakeCluster()
    cluster.uids = [["1"], ["2"]]
    with pytest.raises(UsageError, match="replaced by another machine"):
        reclaim(cluster, "spot-1", 0.0, "taint", report=lambda _: None)
    assert cluster.history["spot-1"] == "Ready, taint"


def test_deleted_node_cannot_be_reclaimed():
    cluster: Any = FakeCluster()
    cluster.uids = [[]]
    with pytest.raises(UsageError, match="already deleted"):
        reclaim(cluster, "spot-1", 0.0, "drain", report=lambda _: None)
    assert cluster.history["spot-1"] == "Ready"


class SlowCluster:
    """A cluster with one verb, which takes 0.05 s; `max_running` is the largest number of calls at the same time."""

    def __init__(self, folder):
        self.folder = folder
        self.running = 0
        self.max_running = 0

    @cluster_state.exclusive
    def change(self):
        self.running += 1
        self.max_running = max(self.max_running, self.running)
        time.sleep(0.05)
        self.running -= 1


def test_exclusive_verbs_run_one_at_a_time():
    cluster = SlowCluster(
        cluster_state.create(cluster_state.folder_of("one"), taken=set()).folder
    )
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: cluster.change(), range(4)))
    assert cluster.max_running == 1


def test_verb_waiting_during_down_leaves_the_new_cluster():
    folder = cluster_state.create(cluster_state.folder_of("one"), taken=set()).folder
    cluster = SlowCluster(folder)
    with ThreadPoolExecutor(1) as pool:
        with cluster_state.locked_cluster(folder):
            waiting = pool.submit(cluster.change)
            time.sleep(0.1)
            cluster_state.remove(folder)
            cluster_state.create(cluster_state.folder_of("one"), taken=set())
        with pytest.raises(
            cluster_state.TakenDown, match="was deleted while this command waited"
        ):
            waiting.result()
    assert cluster.max_running == 0


@pytest.mark.parametrize(
    "content", ['{"subnet": 1', "[]", "{}", '{"subnet": "a", "nodes": {"n": 1}}']
)
def test_invalid_state_file_is_refused_and_blocks_no_cluster(content):
    known = cluster_state.create(cluster_state.folder_of("one"), taken=set())
    (known.folder / "cluster.json").write_text(content)
    with pytest.raises(UsageError, match=r"is invalid.* down"):
        cluster_state.State.read(known.folder)
    assert cluster_state.create(
        cluster_state.folder_of("two"), taken=set()
    ).folder.is_dir()


def test_same_name_in_two_caches_gets_distinct_bridges(monkeypatch, tmp_path):
    here = Network(cluster_state.mark(cluster_state.folder_of("one")), 0)
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "other"))
    there = Network(cluster_state.mark(cluster_state.folder_of("one")), 1)
    assert here.bridge != there.bridge


def test_duplicate_node_name_is_refused():
    known = cluster_state.create(cluster_state.folder_of("one"), taken=set())
    known.assign_index(parse("spot")[0])
    with pytest.raises(UsageError, match="spot-1"):
        known.assign_index(parse("spot")[0])


def test_changed_archive_changes_the_store_name(tmp_path):
    archive = tmp_path / "mine.tar"
    archive.write_text("first")
    before = image_store.store_name([archive], tmp_path)
    archive.write_text("the second")
    assert image_store.store_name([archive], tmp_path) != before


def test_protected_archive_survives_its_original(tmp_path):
    archive = tmp_path / "mine.tar"
    archive.write_text("an image")
    kept = image_store.protect(archive, tmp_path / "cluster")
    archive.unlink()
    assert kept.read_text() == "an image"
    assert image_store.protect(kept, tmp_path / "cluster") == kept


def test_interrupted_clone_is_redone_and_never_changes_store(tmp_path):
    database = tmp_path / "store" / "meta" / "meta.db"
    database.parent.mkdir(parents=True)
    database.write_text("the store's")
    interrupted = tmp_path / "var" / "lib" / "containerd.123" / "meta"
    interrupted.mkdir(parents=True)
    (interrupted / "meta.db").hardlink_to(database)
    image_store.clone_store(tmp_path / "store", tmp_path / "var")
    copy = tmp_path / "var" / "lib" / "containerd" / "meta" / "meta.db"
    copy.write_text("the node's")
    assert database.read_text() == "the store's"
    assert not interrupted.exists()


def test_state_file_is_json():
    known = cluster_state.create(cluster_state.folder_of("one"), taken=set())
    assert (
        json.loads((known.folder / "cluster.json").read_text())["subnet"]
        == known.subnet
    )


def test_parallel_clusters_unpack_the_same_images_once(tmp_path):
    store = tmp_path / "stores" / "same"
    unpacked = []

    def unpack():
        unpacked.append(store)
        time.sleep(0.2)
        store.mkdir()

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda _: image_store.provide(store, unpack), range(3)))
    assert unpacked == [store]


def test_failed_unpacking_is_retried_by_the_next_cluster(tmp_path):
    store = tmp_path / "stores" / "same"
    with pytest.raises(OSError, match="nowhere"):
        image_store.provide(store, (tmp_path / "nowhere" / "to").mkdir)
    image_store.provide(store, store.mkdir)
    assert store.is_dir()


def test_unused_stores_are_deleted_when_another_is_filled(tmp_path):
    used, old, fresh = (tmp_path / "stores" / name for name in ("used", "old", "fresh"))
    known = cluster_state.create(cluster_state.folder_of("one"), taken=set())
    known.image_store = used.name
    known.save()
    for store in (used, old, fresh):
        image_store.provide(store, store.mkdir)
    assert {path.name for path in (tmp_path / "stores").iterdir()} == {"used", "fresh"}
