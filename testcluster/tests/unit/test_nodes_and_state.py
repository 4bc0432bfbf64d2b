"""What is asked for is read as it is written, and what is wrong is named with the way out."""

import json
import os
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from testcluster import providers, state
from testcluster.errors import UsageError
from testcluster.linux_namespaces import checks, image_store
from testcluster.linux_namespaces.network import Network
from testcluster.nodes import MAX_NODES, parse
from testcluster.reclaim import reclaim
from testcluster.state import State


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


@pytest.mark.parametrize(
    "wish", ["", "spots", "spot:x", "spot:-1", "ondemand;spot", "spot:", "spot@-", f"spot:{'9' * 5000}"]
)
def test_what_is_no_node_class_is_refused_with_those_there_are(wish):
    with pytest.raises(UsageError, match="ondemand, spot, gpu"):
        parse(wish)


def test_more_nodes_than_a_machine_holds_are_refused_with_another_way():
    with pytest.raises(UsageError, match="kwok"):
        parse(f"spot:{MAX_NODES + 1}")
    with pytest.raises(UsageError, match="kwok"):
        parse("spot:999999999,spot")


def test_two_clusters_get_networks_of_their_own_and_leave_those_in_use_alone():
    first = state.create(state.folder_of("one"), taken={0})
    second = state.create(state.folder_of("two"), taken={0, 2})
    assert (first.subnet, second.subnet) == (1, 3)


def test_a_cluster_that_exists_is_refused_with_the_way_to_remove_it():
    state.create(state.folder_of("one"), taken=set())
    with pytest.raises(UsageError, match="--name one down"):
        state.create(state.folder_of("one"), taken=set())


def test_no_network_left_is_refused():
    with pytest.raises(UsageError, match="in use"):
        state.create(state.folder_of("one"), taken=set(range(256)))


@pytest.mark.parametrize("name", ["", "Dev", "a/b", "../x", "x" * 32, "9lives"])
def test_a_name_that_could_leave_its_folder_or_break_a_link_is_refused(name):
    with pytest.raises(UsageError, match="cannot be a cluster's name"):
        state.folder_of(name)


def test_what_is_remembered_is_read_back(cache):
    known = state.create(state.folder_of("one"), taken=set())
    for node in parse("ondemand,spot"):
        known.assign_index(node)
    known.save()
    again = State.read(known.folder)
    assert again == known
    assert again.indexes == {"ondemand-1": 1, "spot-1": 2}


def test_there_is_no_cluster_says_how_to_make_one():
    with pytest.raises(UsageError, match="--name nobody up"):
        providers.find("nobody")


def test_link_names_fit_the_kernel_for_any_cluster():
    network = Network(state.mark(Path("/a/long/way") / ("x" * 31)), 255)
    assert len(network.cable(63).end) <= 15


def test_a_full_disk_is_named_before_anything_is_begun(cache, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1 << 30))
    with pytest.raises(UsageError, match=r"1\.0 GiB free at .*needs 2"):
        checks.check_disk(cache / "clusters" / "one")
    assert not (cache / "clusters").exists()


def test_more_kubelets_than_the_kernel_lets_watch_files_are_refused_with_the_setting():
    with pytest.raises(UsageError, match=r"sysctl fs\.inotify\.max_user_instances="):
        checks.check_watches(1_000_000)


def test_without_root_it_says_so_and_what_else_there_is(cache, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(UsageError, match="needs root"):
        checks.check(cache)


def test_a_node_image_is_of_no_use_without_docker():
    with pytest.raises(UsageError, match="node-image"):
        providers.choose("one", "bare", node_image="local:1")


class Cloud:
    """A cluster that only notes what became of it."""

    def __init__(self):
        self.kube = self
        self.nodes = {"spot-1": "Ready"}
        self.uids = [["1"], ["1"]]

    def nodes_called(self, node):
        return [{"metadata": {"name": f"{node}-here", "uid": uid}} for uid in self.uids.pop(0)]

    def run(self, verb, *arguments, timeout=0):
        self.nodes["spot-1"] += f", {verb}"

    def delete(self, node):
        self.nodes[node] += ", gone"


@pytest.mark.parametrize(("by", "seen"), [("taint", "Ready, taint, gone"), ("drain", "Ready, drain, gone")])
def test_a_reclaimed_node_is_told_first_and_gone_afterwards(by, seen):
    cloud = Cloud()
    reclaim(cloud, "spot-1", 0.1, by, say=lambda _: None)
    assert cloud.nodes["spot-1"] == seen


def test_a_machine_that_got_no_notice_is_not_taken_when_the_notice_of_another_is_over():
    cloud = Cloud()
    cloud.uids = [["1"], ["2"]]
    with pytest.raises(UsageError, match="another machine"):
        reclaim(cloud, "spot-1", 0.0, "taint", say=lambda _: None)
    assert cloud.nodes["spot-1"] == "Ready, taint"


def test_a_node_that_is_gone_cannot_be_reclaimed():
    cloud = Cloud()
    cloud.uids = [[]]
    with pytest.raises(UsageError, match="gone already"):
        reclaim(cloud, "spot-1", 0.0, "drain", say=lambda _: None)
    assert cloud.nodes["spot-1"] == "Ready"


class Changing:
    """A cluster whose only verb takes a while."""

    def __init__(self, folder):
        self.folder, self.at_once, self.most = folder, 0, 0

    @state.exclusive
    def change(self):
        self.at_once += 1
        self.most = max(self.most, self.at_once)
        time.sleep(0.05)
        self.at_once -= 1


def test_what_changes_a_cluster_goes_one_after_the_other():
    cluster = Changing(state.create(state.folder_of("one"), taken=set()).folder)
    with ThreadPoolExecutor(4) as verbs:
        list(verbs.map(lambda _: cluster.change(), range(4)))
    assert cluster.most == 1


def test_a_verb_that_waited_while_the_cluster_was_taken_down_leaves_its_successor_alone():
    folder = state.create(state.folder_of("one"), taken=set()).folder
    cluster = Changing(folder)
    with ThreadPoolExecutor(1) as verbs:
        with state.locked_cluster(folder):
            waiting = verbs.submit(cluster.change)
            time.sleep(0.1)
            state.remove(folder)
            state.create(state.folder_of("one"), taken=set())
        with pytest.raises(state.TakenDown, match="taken down meanwhile"):
            waiting.result()
    assert cluster.most == 0


@pytest.mark.parametrize("content", ['{"subnet": 1', "[]", "{}", '{"subnet": "a", "nodes": {"n": 1}}'])
def test_a_broken_memory_is_said_with_what_to_do_and_is_in_nobody_elses_way(content):
    known = state.create(state.folder_of("one"), taken=set())
    (known.folder / "cluster.json").write_text(content)
    with pytest.raises(UsageError, match=r"cannot be understood.* down"):
        state.State.read(known.folder)
    assert state.create(state.folder_of("two"), taken=set()).folder.is_dir()


def test_clusters_of_one_name_in_two_caches_share_nothing_on_the_host(monkeypatch, tmp_path):
    here = Network(state.mark(state.folder_of("one")), 0)
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "other"))
    there = Network(state.mark(state.folder_of("one")), 1)
    assert here.bridge != there.bridge


def test_two_nodes_cannot_have_one_name():
    known = state.create(state.folder_of("one"), taken=set())
    known.assign_index(parse("spot")[0])
    with pytest.raises(UsageError, match="spot-1"):
        known.assign_index(parse("spot")[0])


def test_an_archive_that_changed_is_another_pantry(tmp_path):
    archive = tmp_path / "mine.tar"
    archive.write_text("first")
    before = image_store.store_name([archive], tmp_path)
    archive.write_text("the second")
    assert image_store.store_name([archive], tmp_path) != before


def test_what_was_loaded_stays_when_its_owner_removes_it(tmp_path):
    archive = tmp_path / "mine.tar"
    archive.write_text("an image")
    kept = image_store.protect(archive, tmp_path / "cluster")
    archive.unlink()
    assert kept.read_text() == "an image"
    assert image_store.protect(kept, tmp_path / "cluster") == kept


def test_a_copy_that_was_broken_off_is_made_anew_and_never_writes_into_the_pantry(tmp_path):
    book = tmp_path / "pantry" / "meta" / "meta.db"
    book.parent.mkdir(parents=True)
    book.write_text("the pantry's")
    broken_off = tmp_path / "var" / "lib" / "containerd.123" / "meta"
    broken_off.mkdir(parents=True)
    (broken_off / "meta.db").hardlink_to(book)
    image_store.clone_store(tmp_path / "pantry", tmp_path / "var")
    own = tmp_path / "var" / "lib" / "containerd" / "meta" / "meta.db"
    own.write_text("the node's")
    assert book.read_text() == "the pantry's"
    assert not broken_off.exists()


def test_the_state_is_json_that_a_person_can_read():
    known = state.create(state.folder_of("one"), taken=set())
    assert json.loads((known.folder / "cluster.json").read_text())["subnet"] == known.subnet


def test_clusters_that_want_the_same_images_at_once_unpack_them_once(tmp_path):
    pantry, unpacked = tmp_path / "pantry" / "same", []

    def unpack():
        unpacked.append(pantry)
        time.sleep(0.2)
        pantry.mkdir()

    with ThreadPoolExecutor(3) as clusters:
        list(clusters.map(lambda _: image_store.provide(pantry, unpack), range(3)))
    assert unpacked == [pantry]


def test_what_could_not_be_unpacked_is_unpacked_by_the_next(tmp_path):
    pantry = tmp_path / "pantry" / "same"
    with pytest.raises(OSError, match="nowhere"):
        image_store.provide(pantry, (tmp_path / "nowhere" / "to").mkdir)
    image_store.provide(pantry, pantry.mkdir)
    assert pantry.is_dir()


def test_what_no_cluster_was_made_of_goes_when_something_else_is_unpacked(tmp_path):
    used, old, fresh = (tmp_path / "pantry" / name for name in ("used", "old", "fresh"))
    known = state.create(state.folder_of("one"), taken=set())
    known.image_store = used.name
    known.save()
    for pantry in (used, old, fresh):
        image_store.provide(pantry, pantry.mkdir)
    assert {path.name for path in (tmp_path / "pantry").iterdir()} == {"used", "fresh"}
