"""A setting under the name of another tool gets one message, with its name here."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import yaml

from finetune_cli.manifest.manifest import read_all
from finetune_cli.manifest.other_names import NO_FIELD, OTHER_NAMES

LEAST = {"model": {"uri": "base"}, "datasets": [{"uri": "data.jsonl"}]}
TASKS = {"tasks": [{"name": "exam"}]}

# Where the user writes it -> what the message calls it. Dots separate keys; [] stands for the first entry of a list.
PODS = [
    ("activeDeadlineSeconds", "maxRuntimeSeconds"),
    ("train.secretRefs", "pod.envFrom: [{secretRef: {name: …}}]"),
    ("train.env", "pod.env: [{name: …, value: …}]"),
    ("train.nodeSelector", "pod.nodeSelector"),
    ("train.tolerations", "pod.tolerations"),
    ("train.placement.nodeSelector", "spec.train.pod.nodeSelector"),
    ("train.placement.tolerations", "spec.train.pod.tolerations"),
    ("deploy.placement.affinity", "spec.deploy.pod.affinity"),
    ("train.pod.resources.gpu", "limits: {nvidia.com/gpu: 1}"),
    ("train.pod.resources.cpu", "requests: {cpu: …}"),
    ("train.pod.resources.memory", "requests: {memory: …}"),
    ("train.batchSize", "microBatchSize"),
]
TRAINING = [
    ("train.r", "lora.rank"),
    ("train.lora.r", "rank"),
    ("train.lora_alpha", "lora.alpha"),
    ("train.lora.lora_alpha", "alpha"),
    ("train.rl", "objective: DPO"),
    ("train.lora_model_dir", "startFrom.uri"),
    ("train.rl_beta", "dpo.beta"),
    ("train.beta", "dpo.beta"),
    ("train.dpo_beta", "dpo.beta"),
    ("train.loss_type", "objective: DPO, whose loss is sigmoid,"),
    ("train.label_smoothing", "dpo.labelSmoothing"),
    ("train.dpo_label_smoothing", "dpo.labelSmoothing"),
    ("train.optim", "optimizer.name: AdamW, or AdamW8Bit,"),
    ("train.lora_dropout", "lora.dropout"),
    ("train.modules_to_save", "lora.modulesToSave"),
    ("train.lora_modules_to_save", "lora.modulesToSave"),
    ("load_in_4bit", "train.method: QLoRA"),
    ("train.qlora", "method: QLoRA"),
    ("train.lora.use_rslora", "variant: RsLoRA"),
    ("train.lora.use_dora", "variant: DoRA"),
    ("train.lr", "optimizer.learningRate"),
    ("train.optimizer.lr", "learningRate"),
    ("lr", "train.optimizer.learningRate"),
    ("train.num_train_epochs", "epochs"),
    ("train.per_device_train_batch_size", "microBatchSize"),
    ("train.lr_scheduler_type", "optimizer.scheduler"),
    ("train.warmup_ratio", "optimizer.warmupFraction"),
    ("train.warmup_steps", "optimizer.warmupFraction, a fraction of all steps,"),
    ("train.optimizer.adam_beta1", "beta1"),
    ("train.optimizer.adam_beta2", "beta2"),
    ("train.save_steps", "checkpoint.everySteps"),
    ("train.saveSteps", "checkpoint.everySteps"),
    ("train.save_total_limit", "checkpoint.keep"),
    ("train.torch_compile", "compile"),
    ("train.bf16", "dtype: BF16"),
    ("train.fp32", "dtype: FP32"),
    ("train.early_stopping_patience", "earlyStopping.patience"),
    ("train.report_to", "spec.tracking"),
    ("train.max_seq_length", "spec.prepare.contextLength"),
    ("prepare.max_length", "contextLength"),
    ("chat_template", "prepare.chatTemplate"),
    ("train.chat_template_path", "spec.prepare.chatTemplate"),
    ("prepare.chat_template_jinja", "chatTemplate"),
    ("prepare.chat_template_kwargs", "chatTemplateArguments"),
    ("prepare.chat_template_args", "chatTemplateArguments"),
    ("prepare.enable_thinking", "chatTemplateArguments: {enable_thinking: …}"),
    ("model_name_or_path", "model.uri"),
    ("dataset_name", "datasets: [{uri: …}]"),
    ("hub_model_id", "push.targets: [{uri: hf://…}]"),
    ("deploy.max_new_tokens", "smokeTest.maxTokens"),
    ("train.seed", "spec.seed"),
    ("base_model", "model.uri"),
    ("train.num_epochs", "epochs"),
    ("adapter", "train.method: LoRA"),
    ("lora_r", "train.lora.rank"),
    ("train.lora_target_modules", "lora.targetModules"),
    ("train.lr_scheduler", "optimizer.scheduler"),
    ("train.min_lr", "optimizer.minLearningRateFraction"),
    ("train.min_lr_rate", "optimizer.minLearningRateFraction"),
    ("train.cosine_min_lr_ratio", "optimizer.minLearningRateFraction"),
    ("prepare.sequence_len", "contextLength"),
    ("sample_packing", "prepare.packing"),
    ("val_set_size", "validation.fraction"),
    ("wandb_project", "tracking.wandb.project"),
    ("evaluate.num_fewshot", "tasks: [{fewShot: …}]"),
    ("evaluate.tasks[].num_fewshot", "fewShot"),
]
TRAINING += [
    ("train.packing", "spec.prepare.packing"),
    ("seed_value", "seed"),
    ("push.repo_id", "targets: [{uri: hf://…}]"),
    ("push.targets[].repo_id", "uri: hf://ORG/NAME"),
    ("push.targets[].target", "uri"),
    ("push.uri", "targets: [{uri: …}]"),
    ("push.format", "targets: [{format: …}]"),
    ("model.name", "uri"),
    ("model.path", "uri"),
    ("model.id", "uri"),
    ("prepare.max_seq_len", "contextLength"),
    ("train.push_to_hub", "spec.push.targets: [{uri: hf://…}]"),
    ("lora_target_linear", "train.lora.targetModules: [all-linear]"),
    ("deploy.framework", "engine"),
    ("datasets[].path", "uri"),
    ("datasets[].name", "uri, or config beside a uri,"),
    ("datasets[].data_files", "uri: hf://ORG/NAME/FILE"),
    ("datasets[].ds_type", "format"),
    ("datasets[].field_messages", "columns: {messages: …}"),
    ("mlflow_tracking_uri", "tracking.mlflow.uri"),
    ("mlflow_experiment_name", "tracking.mlflow.experiment"),
    ("tracking.mlflow.tracking_uri", "uri"),
    ("wandb_entity", "tracking.wandb.entity"),
    ("train.nnodes", "nodes"),
    ("train.num_nodes", "nodes"),
    ("train.num_machines", "nodes"),
    ("train.world_size", "nodes, with spec.train.processesPerNode,"),
    ("train.nproc_per_node", "processesPerNode"),
    ("train.numProcPerNode", "processesPerNode"),
    ("train.num_gpus", "pod.resources.limits: {nvidia.com/gpu: 2}"),
    ("train.num_processes", "processesPerNode, the processes of one node,"),
    ("evaluate.tasks[].task", "name"),
    ("evaluate.limit", "tasks: [{limit: …}]"),
    ("train.pod.env[].key", "name"),
    ("prepare.cutoff_len", "contextLength"),
    ("train.finetuning_type", "method: LoRA, QLoRA or Full"),
    ("train.lora_target", "lora.targetModules"),
    ("train.additional_target", "lora.modulesToSave"),
    ("train.quantization_bit", "method: QLoRA"),
    ("prepare.neat_packing", "packing"),
    ("val_size", "validation.fraction"),
    ("train.pref_beta", "dpo.beta"),
    ("train.adapter_name_or_path", "startFrom.uri"),
    ("train.gradient_clipping", "optimizer.maxGradNorm"),
    ("prepare.dataset_text_field", "spec.datasets: [{columns: {text: …}}]"),
    ("train.use_peft", "method: LoRA"),
    ("train.hub_private_repo", "spec.push.targets: [{private: true}]"),
    ("train.use_gradient_checkpointing", "gradientCheckpointing"),
    ("train.torch_dtype", "dtype"),
]
WORDS = [
    ("train.lora_rank", "lora.rank"),
    ("train.warmup", "optimizer.warmupFraction"),
    ("train.grad_accum", "gradientAccumulationSteps"),
    ("train.precision", "dtype"),
    ("train.mixed_precision", "dtype"),
    ("train.quantization_config", "method: QLoRA"),
    ("train.quantization", "method: QLoRA"),
    ("train.fsdp", "parallelism: FSDP"),
    ("train.use_lora", "method: LoRA"),
    ("train.use_qlora", "method: QLoRA"),
    ("train.full_finetuning", "method: Full"),
    ("train.peft_config", "lora"),
    ("train.timeout", "maxRuntimeSeconds"),
    ("train.retries", "maxFailures"),
    ("train.logging_dir", "spec.tracking.tensorboard.uri"),
    ("datasets[].subset", "config"),
    ("datasets[].file", "uri"),
    ("datasets[].source", "uri"),
    ("datasets[].field_instruction", "columns: {prompt: …}"),
    ("datasets[].field_output", "columns: {completion: …}"),
    ("model.repo", "uri"),
    ("model.source", "uri"),
    ("evaluate.few_shot", "tasks: [{fewShot: …}]"),
    ("evaluate.tasks[].path", "file"),
    ("evaluate.tasks[].num_samples", "limit"),
    ("evaluate.threshold", "gates: [{task: …, value: …}]"),
    ("evaluate.gates[].threshold", "value"),
    ("evaluate.gates[].min", "value"),
    ("evaluate.gates[].name", "task"),
    ("push.repo", "targets: [{uri: …}]"),
    ("push.to", "targets: [{uri: …}]"),
    ("push.path", "targets: [{uri: …}]"),
    ("push.private", "targets: [{private: true}]"),
    ("push.targets[].repo", "uri"),
    ("push.targets[].path", "uri"),
    ("push.targets[].name", "uri"),
    ("push.targets[].type", "format"),
    ("deploy.vllm", "engine: VLLM"),
    ("eval_dataset", "validation.uri"),
    ("validation_data", "validation.uri"),
    ("test_data", "validation.uri"),
    ("evaluation", "evaluate"),
    ("workspaceSize", "workspace.size"),
    ("pvc", "workspace.existingClaim"),
    ("output", "push.targets: [{uri: …}]"),
    ("hyperparameters", "train"),
    ("train.eval_strategy", "evalSteps"),
    ("train.evaluation_strategy", "evalSteps"),
    ("train.save_strategy", "checkpoint.everySteps"),
    ("prepare.max_tokens", "contextLength"),
    ("name", "metadata.name"),
    ("namespace", "metadata.namespace"),
]
# What other tools have and this one does not -> a word of the reason.
WITHOUT_FIELD = [
    ("train.master_addr", "the address of the first"),
    ("train.master_port", "the address of the first"),
    ("train.main_process_ip", "the address of the first"),
    ("train.node_rank", "numbers the pods"),
    ("train.machine_rank", "numbers the pods"),
    ("train.load_in_8bit", "QLoRA"),
    ("model.trust_remote_code", "never run"),
    ("train.fp16", "BF16 or FP32"),
    ("flash_attention", "PyTorch chooses"),
    ("train.logging_steps", "how often it reports"),
    ("output_dir", "spec.workspace"),
    ("prepare.template", "prepare.chatTemplate"),
    ("train.ref_model", "the model before training"),
    ("train.precompute_ref_log_probs", "always computed once"),
    ("prepare.max_prompt_length", "prompt and completion together"),
    ("datasets[].type", "from their columns"),
    ("datasets[].limit", "weight takes a sample"),
    ("datasets[].max_samples", "weight takes a sample"),
    ("prepare.max_samples", "weight takes a sample"),
    ("datasets[].sample", "weight takes a sample"),
    ("datasets[].fraction", "weight takes a sample"),
    ("datasets[].max_records", "weight takes a sample"),
    ("train.max_train_samples", "weight takes a sample"),
    ("sweep", "a manifest for each value"),
    ("spec", "below the outer spec"),
    ("train.load_best_model_at_end", "lowest validation loss"),
    ("train.resume_from_checkpoint", "continues from its last checkpoint"),
    ("push.hub_token", "podDefaults.envFrom"),
    ("push.hf_token", "podDefaults.envFrom"),
    ("push.token", "podDefaults.envFrom"),
    ("train.wandb_api_key", "podDefaults.envFrom"),
    ("train.deepspeed", "parallelism: FSDP"),
    ("train.use_unsloth", "own kernels"),
    ("train.train_on_inputs", "prompts do not"),
    ("train.completion_only_loss", "prompts do not"),
    ("train.assistant_only_loss", "prompts do not"),
    ("train.group_by_length", "packing wastes less"),
    ("datasets[].streaming", "read as a stream"),
    ("datasets[].shuffle", "random order"),
    ("train.metric_for_best_model", "lowest validation loss"),
    ("train.pod.volumes", "pvc:// URIs"),
    ("train.pod.volumeMounts", "pvc:// URIs"),
    ("podDefaults.securityContext", "without root"),
]
KUBERNETES = [
    ("train.backoffLimit", "maxFailures"),
    ("backoffLimit", "maxFailures, in each stage,"),
    ("train.gpus", "pod.resources.limits: {nvidia.com/gpu: 1}"),
    ("podDefaults.gpus", "resources.limits: {nvidia.com/gpu: 1}"),
    ("serviceAccount", "podDefaults.serviceAccountName"),
    ("train.pod.serviceAccount", "serviceAccountName"),
    ("train.priorityClass", "pod.priorityClassName"),
    ("train.pod.imagePullSecret", "imagePullSecrets: [{name: …}]"),
    ("workspace.storageClass", "storageClassName"),
    ("workspace.storage", "size"),
    ("workspace.accessModes", "accessMode"),
    ("workspace.claimName", "existingClaim"),
]
ANSWERED = [*PODS, *TRAINING, *KUBERNETES, *WORDS]
# These have the same name here, in another place or another spelling.
ELSEWHERE = [
    ("train.resources", "pod.resources"),
    ("train.image", "pod.image"),
    ("train.command", "pod.command"),
    ("train.args", "pod.args"),
    ("train.serviceAccountName", "pod.serviceAccountName"),
    ("train.priorityClassName", "pod.priorityClassName"),
    ("train.envFrom", "pod.envFrom"),
    ("train.learning_rate", "optimizer.learningRate"),
    ("train.weight_decay", "optimizer.weightDecay"),
    ("train.max_grad_norm", "optimizer.maxGradNorm"),
    ("train.max_steps", "maxSteps"),
    ("train.eval_steps", "evalSteps"),
    ("train.gradient_accumulation_steps", "gradientAccumulationSteps"),
    ("train.gradient_checkpointing", "gradientCheckpointing"),
    ("train.target_modules", "lora.targetModules"),
    ("deploy.prompt", "smokeTest.prompt"),
    ("train.model", "spec.model"),
    ("train.datasets", "spec.datasets"),
    ("train.validation", "spec.validation"),
    ("train.context_length", "spec.prepare.contextLength"),
    ("prepare.eval_steps", "spec.train.evalSteps"),
    ("deploy.run_name", "spec.tracking.runName"),
    ("deploy.maxTokens", "smokeTest.maxTokens"),
]
VALUES = [
    ("prepare.tooLong", "truncate", "Truncate"),
    ("train.objective", "sft", "SFT"),
    ("train.method", "lora", "LoRA"),
    ("train.dtype", "bf16", "BF16"),
    ("train.optimizer.scheduler", "cosine", "Cosine"),
    ("train.lora.variant", "rslora", "RsLoRA"),
    ("train.placement.capacity", "spot", "Spot"),
    ("train.placement.capacity", "on-demand", "OnDemand"),
    ("evaluate.weights", "merged", "Merged"),
    ("evaluate.gates[].against", "base", "Base"),
    ("evaluate.gates[].operator", ">", "GreaterThan"),
    ("push.targets[].format", "adapter", "Adapter"),
    ("push.when", "GatePassed", "GatesPassed"),
    ("deploy.engine", "vllm", "VLLM"),
    ("datasets[].format", "jsonl", "JSONLines"),
]


def written_at(path, value):
    """Return a valid spec but for this value, in place of what the setting replaces."""
    spec: dict[str, Any] = {
        key: deepcopy(part) for key, part in LEAST.items() if key != REPLACED.get(path)
    }
    stage = path.partition(".")[0]
    if stage in {"push", "deploy"} and path != "push.target":
        spec["push"] = {"targets": [{"uri": "published"}]}
    if stage == "evaluate":
        spec["evaluate"] = deepcopy(TASKS)
    if stage == "deploy":
        spec["deploy"] = {"when": "Always"}
    if path.startswith("evaluate.gates[]"):
        gate = {"task": "exam", "value": 0.5}
        spec["evaluate"]["gates"] = [
            {key: part for key, part in gate.items() if key != REPLACED.get(path)}
        ]
    put(spec, path.split("."), value)
    return spec


REPLACED = {
    "dataset_name": "datasets",
    "base_model": "model",
    "model_name_or_path": "model",
}


def put(spec, path, value):
    *above, last = path
    here = spec
    for step in above:
        name = step.removesuffix("[]")
        here = here.setdefault(name, [{}] if step.endswith("[]") else {})
        here = here[0] if step.endswith("[]") else here
    here[last] = value


@pytest.fixture
def diagnose(tmp_path, monkeypatch):
    """A function that returns the diagnostics of a spec, as texts without the file's name."""
    monkeypatch.chdir(tmp_path)

    def diagnose(spec):
        kind = {
            "apiVersion": "finetune.dev/v1alpha1",
            "kind": "FineTunePipeline",
            "metadata": {"name": "demo"},
        }
        Path("p.yaml").write_text(
            yaml.safe_dump({**kind, "spec": spec}, sort_keys=False)
        )
        return [
            f"{diagnostic.path}: {diagnostic.message}"
            for diagnostic in read_all(Path("p.yaml")).diagnostics
        ]

    return diagnose


@pytest.mark.parametrize(("path", "name"), ANSWERED, ids=[path for path, _ in ANSWERED])
def test_other_name_is_answered_with_the_name_here(diagnose, path, name):
    where = f"spec.{path.replace('[]', '[0]')}"
    assert diagnose(written_at(path, 1)) == [
        f"{where}: unknown key; it is called {name} here"
    ]


@pytest.mark.parametrize(
    ("path", "reason"), WITHOUT_FIELD, ids=[path for path, _ in WITHOUT_FIELD]
)
def test_setting_without_a_field_is_answered_with_the_reason(diagnose, path, reason):
    (message,) = diagnose(written_at(path, 1))
    assert message.startswith(
        f"spec.{path.replace('[]', '[0]')}: unknown key; there is no such field: "
    )
    assert reason in message


@pytest.mark.parametrize(
    ("path", "name"), ELSEWHERE, ids=[path for path, _ in ELSEWHERE]
)
def test_name_in_another_place_is_answered_with_its_place(diagnose, path, name):
    value = True if path == "train.gradient_checkpointing" else 1
    assert diagnose(written_at(path, value)) == [
        f"spec.{path}: unknown key; did you mean {name}?"
    ]


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    VALUES,
    ids=[f"{path}-{value}" for path, value, _ in VALUES],
)
def test_value_of_another_version_is_answered_with_ours(
    diagnose, path, value, expected
):
    spec = written_at(path, value)
    if path == "push.when":
        spec["evaluate"] = {**TASKS, "gates": [{"task": "exam", "value": 0.5}]}
    (message,) = diagnose(spec)
    assert message.startswith(f"spec.{path.replace('[]', '[0]')}: must be ")
    assert expected in message


def test_every_other_name_is_tried_where_it_is_written():
    """Every answer of the table is then read once in its place."""
    words = {
        path.rpartition(".")[2].replace("_", "").lower()
        for path, _ in [*ANSWERED, *WITHOUT_FIELD]
    }
    assert {name.rpartition(".")[2] for name in [*OTHER_NAMES, *NO_FIELD]} <= words


@pytest.mark.parametrize(
    ("path", "value", "name"),
    [
        ("evaluate.tasks", {"exam": {}}, "exam"),
        ("train.pod.env", {"STEPS": "8"}, "STEPS"),
    ],
)
def test_list_written_as_a_mapping_is_answered_with_its_form(
    diagnose, path, value, name
):
    message = f"must be a list, with - name: {name} in place of {name}: (got a mapping)"
    assert diagnose(written_at(path, value)) == [f"spec.{path}: {message}"]
