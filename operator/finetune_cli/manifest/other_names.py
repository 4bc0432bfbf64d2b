"""Names of settings in other tools, with the name that they have here."""

import re
from collections.abc import Mapping

from finetune_cli.manifest.missing_fields import NO_FIELD
from finetune_cli.manifest.yaml.reader import Location
from finetune_operator.api.spec import STAGES

POD_NAMES: dict[str, str] = {
    "env": "pod.env: [{name: …, value: …}]",
    "secretrefs": "pod.envFrom: [{secretRef: {name: …}}]",
    "nodeselector": "pod.nodeSelector",
    "tolerations": "pod.tolerations",
    "affinity": "pod.affinity",
    "gpu": "pod.resources.limits: {nvidia.com/gpu: 1}",
    "gpus": "pod.resources.limits: {nvidia.com/gpu: 1}",
    "resources.cpu": "pod.resources.requests: {cpu: …}",
    "resources.memory": "pod.resources.requests: {memory: …}",
    "serviceaccount": "pod.serviceAccountName",
    "priorityclass": "pod.priorityClassName",
    "imagepullsecret": "pod.imagePullSecrets: [{name: …}]",
    "memory": "pod.resources.requests: {memory: …}",
    "cpu": "pod.resources.requests: {cpu: …}",
    "cpus": "pod.resources.requests: {cpu: …}",
    "accelerator": "pod.resources.limits: {nvidia.com/gpu: 1}",
    "accelerators": "pod.resources.limits: {nvidia.com/gpu: 1}",
    "instancetype": "pod.nodeSelector: {node.kubernetes.io/instance-type: …}",
    "priority": "pod.priorityClassName",
    "queue": "pod.labels: {kueue.x-k8s.io/queue-name: …}",
}
"""Settings of a pod, by the paths that they have in a stage."""

OTHER_NAMES: dict[str, str] = {
    **POD_NAMES,
    # TRL, Transformers and PEFT.
    "r": "spec.train.lora.rank",
    "loraalpha": "spec.train.lora.alpha",
    "loradropout": "spec.train.lora.dropout",
    "userslora": "spec.train.lora.variant: RsLoRA",
    "usedora": "spec.train.lora.variant: DoRA",
    "losstype": "spec.train.objective: DPO, whose loss is sigmoid,",
    "labelsmoothing": "spec.train.dpo.labelSmoothing",
    "beta": "spec.train.dpo.beta",
    "dpobeta": "spec.train.dpo.beta",
    "dpolabelsmoothing": "spec.train.dpo.labelSmoothing",
    "optim": "spec.train.optimizer.name: AdamW, or AdamW8Bit,",
    "modulestosave": "spec.train.lora.modulesToSave",
    "loadin4bit": "spec.train.method: QLoRA",
    "qlora": "spec.train.method: QLoRA",
    "lr": "spec.train.optimizer.learningRate",
    "numtrainepochs": "spec.train.epochs",
    "perdevicetrainbatchsize": "spec.train.microBatchSize",
    "lrschedulertype": "spec.train.optimizer.scheduler",
    "minlrrate": "spec.train.optimizer.minLearningRateFraction",
    "minlr": "spec.train.optimizer.minLearningRateFraction",
    "cosineminlrratio": "spec.train.optimizer.minLearningRateFraction",
    "warmupratio": "spec.train.optimizer.warmupFraction",
    "warmupsteps": "spec.train.optimizer.warmupFraction, a fraction of all steps,",
    "packing": "spec.prepare.packing",
    "chattemplate": "spec.prepare.chatTemplate",
    "chattemplatepath": "spec.prepare.chatTemplate",
    "chattemplatejinja": "spec.prepare.chatTemplate",
    "chattemplatekwargs": "spec.prepare.chatTemplateArguments",
    "chattemplateargs": "spec.prepare.chatTemplateArguments",
    "enablethinking": "spec.prepare.chatTemplateArguments: {enable_thinking: …}",
    "seedvalue": "spec.seed",
    "repoid": "spec.push.targets: [{uri: hf://…}]",
    "targets.repoid": "uri: hf://ORG/NAME",
    "targets.target": "uri",
    "push.uri": "targets: [{uri: …}]",
    "push.format": "targets: [{format: …}]",
    "model.name": "uri",
    "model.path": "uri",
    "model.id": "uri",
    "maxseqlen": "spec.prepare.contextLength",
    "pushtohub": "spec.push.targets: [{uri: hf://…}]",
    "loratargetlinear": "spec.train.lora.targetModules: [all-linear]",
    "deploy.framework": "engine",
    "adambeta1": "spec.train.optimizer.beta1",
    "adambeta2": "spec.train.optimizer.beta2",
    "savesteps": "spec.train.checkpoint.everySteps",
    "savetotallimit": "spec.train.checkpoint.keep",
    "torchcompile": "spec.train.compile",
    "bf16": "spec.train.dtype: BF16",
    "fp32": "spec.train.dtype: FP32",
    "earlystoppingpatience": "spec.train.earlyStopping.patience",
    "reportto": "spec.tracking: {wandb: {project: …}}",
    "maxseqlength": "spec.prepare.contextLength",
    "maxlength": "spec.prepare.contextLength",
    "modelnameorpath": "spec.model.uri",
    "datasetname": "spec.datasets: [{uri: …}]",
    "hubmodelid": "spec.push.targets: [{uri: hf://…}]",
    "maxnewtokens": "spec.deploy.smokeTest.maxTokens",
    "train.seed": "spec.seed",
    # axolotl.
    "basemodel": "spec.model.uri",
    "numepochs": "spec.train.epochs",
    "batchsize": "spec.train.microBatchSize",
    "loramodeldir": "spec.train.startFrom.uri",
    "rl": "spec.train.objective: DPO",
    "rlbeta": "spec.train.dpo.beta",
    "adapter": "spec.train.method: LoRA",
    "loramodulestosave": "spec.train.lora.modulesToSave",
    "lorar": "spec.train.lora.rank",
    "loratargetmodules": "spec.train.lora.targetModules",
    "lrscheduler": "spec.train.optimizer.scheduler",
    "sequencelen": "spec.prepare.contextLength",
    "samplepacking": "spec.prepare.packing",
    "valsetsize": "spec.validation.fraction",
    "datasets.path": "uri",
    "datasets.name": "uri, or config beside a uri,",
    "env.key": "name",
    "datasets.datafiles": "uri: hf://ORG/NAME/FILE",
    "datasets.dstype": "format",
    "datasets.fieldmessages": "columns: {messages: …}",
    "mlflowtrackinguri": "spec.tracking.mlflow.uri",
    "mlflowexperimentname": "spec.tracking.mlflow.experiment",
    "trackinguri": "spec.tracking.mlflow.uri",
    "wandbentity": "spec.tracking.wandb.entity",
    "wandbproject": "spec.tracking.wandb.project",
    # torchrun, Accelerate, DeepSpeed and Kubeflow.
    "nnodes": "spec.train.nodes",
    "numnodes": "spec.train.nodes",
    "nummachines": "spec.train.nodes",
    "worldsize": "spec.train.nodes, with spec.train.processesPerNode,",
    "nprocpernode": "spec.train.processesPerNode",
    "numprocpernode": "spec.train.processesPerNode",
    "numgpus": "spec.train.pod.resources.limits: {nvidia.com/gpu: 2}",
    "numprocesses": "spec.train.processesPerNode, the processes of one node,",
    # LLaMA-Factory, unsloth and TRL.
    "cutofflen": "spec.prepare.contextLength",
    "finetuningtype": "spec.train.method: LoRA, QLoRA or Full",
    "loratarget": "spec.train.lora.targetModules",
    "additionaltarget": "spec.train.lora.modulesToSave",
    "quantizationbit": "spec.train.method: QLoRA",
    "neatpacking": "spec.prepare.packing",
    "valsize": "spec.validation.fraction",
    "prefbeta": "spec.train.dpo.beta",
    "adapternameorpath": "spec.train.startFrom.uri",
    "gradientclipping": "spec.train.optimizer.maxGradNorm",
    "datasettextfield": "spec.datasets: [{columns: {text: …}}]",
    "usepeft": "spec.train.method: LoRA",
    "hubprivaterepo": "spec.push.targets: [{private: true}]",
    "usegradientcheckpointing": "spec.train.gradientCheckpointing",
    "torchdtype": "spec.train.dtype",
    "modelmaxlength": "spec.prepare.contextLength",
    "blocksize": "spec.prepare.contextLength",
    "trainbatchsize": "spec.train.microBatchSize",
    "gradientclip": "spec.train.optimizer.maxGradNorm",
    "clipgradnorm": "spec.train.optimizer.maxGradNorm",
    "gradclip": "spec.train.optimizer.maxGradNorm",
    "labelsmoothingfactor": "spec.train.dpo.labelSmoothing",
    "wandbname": "spec.tracking.wandb",
    "wandbrunname": "spec.tracking.wandb",
    "dataseed": "spec.seed",
    "loravariant": "spec.train.lora.variant",
    "peft": "spec.train.lora",
    "pefttype": "spec.train.method: LoRA",
    "testsize": "spec.validation.fraction",
    "validationfile": "spec.validation.uri",
    "trainfile": "spec.datasets: [{uri: …}]",
    "train.dataset": "spec.datasets: [{uri: …}]",
    "modelname": "spec.model.uri",
    "rlmethod": "spec.train.objective: DPO",
    "algorithm": "spec.train.objective: SFT or DPO",
    "minlrratio": "spec.train.optimizer.minLearningRateFraction",
    "totalsteps": "spec.train.maxSteps",
    "trainsteps": "spec.train.maxSteps",
    "steps": "spec.train.maxSteps",
    "iterations": "spec.train.maxSteps",
    "iters": "spec.train.maxSteps",
    "fsdpconfig": "spec.train.parallelism: FSDP",
    "fullfinetune": "spec.train.method: Full",
    # Words without a tool.
    "ttl": "spec.ttlSecondsAfterFinished",
    "capacitytype": "placement.capacity",
    "spot": "placement: {capacity: Spot}",
    "threshold": "spec.evaluate.gates: [{task: …, value: …}]",
    "serve": "spec.deploy",
    "server": "spec.deploy",
    "vllm": "spec.deploy.engine: VLLM",
    "claim": "spec.workspace.existingClaim",
    "schedule": "spec.deadline, or a CronJob that creates the pipeline,",
    "cron": "spec.deadline, or a CronJob that creates the pipeline,",
    "namespace": "metadata.namespace",
    "lorarank": "spec.train.lora.rank",
    "warmup": "spec.train.optimizer.warmupFraction",
    "gradaccum": "spec.train.gradientAccumulationSteps",
    "precision": "spec.train.dtype",
    "mixedprecision": "spec.train.dtype",
    "quantizationconfig": "spec.train.method: QLoRA",
    "quantization": "spec.train.method: QLoRA",
    "fsdp": "spec.train.parallelism: FSDP",
    "uselora": "spec.train.method: LoRA",
    "useqlora": "spec.train.method: QLoRA",
    "fullfinetuning": "spec.train.method: Full",
    "peftconfig": "spec.train.lora",
    "timeout": "maxRuntimeSeconds",
    "retries": "maxFailures",
    "loggingdir": "spec.tracking.tensorboard.uri",
    "columns.conversations": "messages",
    "columns.conversation": "messages",
    "columns.chat": "messages",
    "columns.dialogue": "messages",
    "columns.functions": "tools",
    "columns.question": "instruction",
    "columns.query": "instruction",
    "columns.context": "input",
    "columns.answer": "output, or beside prompt completion,",
    "columns.response": "output, or beside prompt completion,",
    "columns.positive": "chosen",
    "columns.accepted": "chosen",
    "columns.negative": "rejected",
    "datasets.subset": "config",
    "datasets.file": "uri",
    "datasets.source": "uri",
    "datasets.fieldinstruction": "columns: {prompt: …}",
    "datasets.fieldoutput": "columns: {completion: …}",
    "model.hf": "uri: hf://ORG/NAME",
    "model.url": "uri",
    "datasets.hf": "uri: hf://ORG/NAME",
    "datasets.url": "uri",
    "datasets.train": "uri",
    "model.repo": "uri",
    "model.source": "uri",
    "evaluate.fewshot": "tasks: [{fewShot: …}]",
    "tasks.path": "file",
    "tasks.numsamples": "limit",
    "evaluate.threshold": "gates: [{task: …, value: …}]",
    "gates.threshold": "value",
    "gates.min": "value",
    "gates.name": "task",
    "push.repo": "targets: [{uri: …}]",
    "push.to": "targets: [{uri: …}]",
    "push.path": "targets: [{uri: …}]",
    "push.private": "targets: [{private: true}]",
    "targets.repo": "uri",
    "targets.path": "uri",
    "targets.name": "uri",
    "targets.type": "format",
    "deploy.vllm": "engine: VLLM",
    "evaldataset": "spec.validation.uri",
    "validationdata": "spec.validation.uri",
    "testdata": "spec.validation.uri",
    "evaluation": "spec.evaluate",
    "workspacesize": "spec.workspace.size",
    "pvc": "spec.workspace.existingClaim",
    "output": "spec.push.targets: [{uri: …}]",
    "hyperparameters": "spec.train",
    "evalstrategy": "spec.train.evalSteps",
    "evaluationstrategy": "spec.train.evalSteps",
    "savestrategy": "spec.train.checkpoint.everySteps",
    "prepare.maxtokens": "contextLength",
    "spec.name": "metadata.name",
    "spec.namespace": "metadata.namespace",
    # lm-eval.
    "numfewshot": "tasks: [{fewShot: …}]",
    "tasks.numfewshot": "fewShot",
    "tasks.task": "name",
    "evaluate.limit": "tasks: [{limit: …}]",
    # Kubernetes.
    "activedeadlineseconds": "maxRuntimeSeconds",
    "shmsize": "pod.sharedMemory",
    "backofflimit": "maxFailures",
    "spec.backofflimit": "maxFailures, in each stage,",
    "storageclass": "spec.workspace.storageClassName",
    "storage": "spec.workspace.size",
    "accessmodes": "spec.workspace.accessMode",
    "claimname": "spec.workspace.existingClaim",
}
"""The name in lower case without separators, or below a certain key -> the name here.

A name here is a path in the document, in the stage around it, or beside the other name.
"""


def reason_for_no_field(key: str, location: Location) -> str | None:
    """Return why a setting of another tool has no field here; None for other keys."""
    return _find(NO_FIELD, key, location)


def _find(table: Mapping[str, str], key: str, location: Location) -> str | None:
    # Tools separate words by _, - or capitals.
    word = key.replace("_", "").replace("-", "").lower()
    keys = _keys(location)
    if keys:
        # The entry for this place first: `name` in tasks means something else than in a stage.
        entry = table.get(f"{keys[-1]}.{word}")
        if entry:
            return entry
    return table.get(word)


def _keys(location: Location) -> list[str]:
    """Return the keys of a location, without the indexes of lists."""
    return [step for step in location if isinstance(step, str)]


def name_here(key: str, location: Location) -> str | None:
    """Return the name here of a setting of another tool, as seen from its location, or None."""
    name = _find(OTHER_NAMES, key, location)
    if name is None:
        return None
    keys = _keys(location)
    if name.startswith("pod."):
        stages = {kind.name for kind in STAGES}
        # keys[0] is spec, and keys[1] the stage.
        if len(keys) > 1 and keys[1] in stages:
            name = f"spec.{keys[1]}.{name}"
        else:
            name = f"spec.podDefaults.{name.removeprefix('pod.')}"
    # Relative to the place where the user has written it.
    return name.removeprefix(".".join([*keys, ""]))


def location_here(name: str, location: Location) -> Location:
    """Return the location of a setting with this name, as seen from a location."""
    # The name may be followed by its form, as in datasets: [{uri: …}].
    path = re.split(r"[^\w.]", name, maxsplit=1)[0].split(".")
    if path[0] == "spec":
        return tuple(path)
    return (*location, *path)
