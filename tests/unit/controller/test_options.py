"""Wrong values of the placement and of the defaults end the operator's process at once, with the name of the field."""

import json

import pytest

from finetune_operator.__main__ import main

A_CLASS = {"name": "h100", "capacity": "Spot"}


@pytest.mark.parametrize(
    ("placement", "error"),
    [
        (
            {"preset": "gcp"},
            "preset: must be one of aks, eks, generic, gke, karpenter, not 'gcp'",
        ),
        ({"spots": {}}, "spots: Extra inputs are not permitted"),
        ({"currency": ""}, "currency: String should have at least 1 character, not ''"),
        (
            {"returnSeconds": 0},
            "returnSeconds: Input should be greater than or equal to 1, not 0",
        ),
        (
            {"nodeClasses": [{"name": "h100"}]},
            "nodeClasses[0].capacity: Field required",
        ),
        (
            {"nodeClasses": [{**A_CLASS, "price": "1 $"}]},
            "nodeClasses[0].price: Input should be a valid decimal",
        ),
        (
            {"nodeClasses": [A_CLASS, A_CLASS]},
            "nodeClasses: the name h100 is not unique: rename one of them",
        ),
        ({"pools": {"eval": {"taints": 1}}, "preset": "x"}, "and 1 more"),
    ],
    ids=str,
)
def test_wrong_placement_ends_the_operator_with_its_field(placement, error, capsys):
    with pytest.raises(SystemExit, match="2"):
        main([f"--placement={json.dumps(placement)}"])
    line = capsys.readouterr().err.splitlines()[-1]
    assert "argument --placement: " in line
    assert error in line
    assert line.endswith(": correct `placement` in the values of the chart")


def test_placement_that_is_no_json_ends_the_operator(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["--placement={"])
    assert "argument --placement: Invalid JSON" in capsys.readouterr().err


def test_wrong_defaults_end_the_operator_with_their_field(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(['--defaults={"podDefaults": {"image": "x"}}'])
    line = capsys.readouterr().err.splitlines()[-1]
    assert (
        "argument --defaults: podDefaults.image: Extra inputs are not permitted" in line
    )
    assert line.endswith(": correct `defaults` in the values of the chart")
