{{- /* The fields of the objects that the operator creates: an allow-list, so that a new field of Kubernetes is refused.
The fields that the API server fills in are in it. dyn(), because CEL knows an object's fields and not their number. */}}
{{- define "finetune.builtPodRules" }}
- expression: >-
    request.operation != 'CREATE' || (
    dyn(variables.pod).all(key, key in ['containers', 'initContainers', 'volumes', 'restartPolicy', 'dnsPolicy',
    'terminationGracePeriodSeconds', 'nodeSelector', 'serviceAccountName', 'serviceAccount',
    'automountServiceAccountToken', 'securityContext', 'imagePullSecrets', 'affinity', 'schedulerName', 'tolerations',
    'priorityClassName', 'enableServiceLinks', 'topologySpreadConstraints', 'runtimeClassName', 'subdomain'])
    && dyn(object.spec.template.metadata).all(key, key in ['labels', 'annotations', 'creationTimestamp'])
    && dyn(variables.pod.securityContext).all(key, key in ['runAsNonRoot', 'runAsUser', 'runAsGroup', 'fsGroup',
    'fsGroupChangePolicy', 'supplementalGroups', 'seccompProfile', 'appArmorProfile']))
  message: "field: the operator's pods have none but the fields in its chart's templates/_built_fields.tpl"
  reason: Forbidden
- expression: >-
    request.operation != 'CREATE' || variables.containers.all(container,
    dyn(container).all(key, key in ['name', 'image', 'imagePullPolicy', 'command', 'env', 'envFrom', 'ports',
    'resources', 'securityContext', 'terminationMessagePath', 'terminationMessagePolicy', 'volumeMounts']
    || (container.name == 'stage' && request.resource.resource == 'deployments'
    && key in ['startupProbe', 'readinessProbe', 'livenessProbe', 'lifecycle']))
    && dyn(container.securityContext).all(key, key in ['allowPrivilegeEscalation', 'readOnlyRootFilesystem',
    'capabilities', 'privileged', 'runAsNonRoot', 'runAsUser', 'runAsGroup', 'seccompProfile', 'appArmorProfile']))
  message: "field: the operator's containers have none but the fields in its chart's templates/_built_fields.tpl"
  reason: Forbidden
- expression: >-
    request.operation != 'CREATE' || (
    variables.containers.all(container, container.securityContext.?readOnlyRootFilesystem.orValue(false)
    && container.securityContext.?runAsUser.orValue(65532) == 65532
    && container.securityContext.?runAsGroup.orValue(65532) == 65532)
    && variables.pod.securityContext.?runAsUser.orValue(65532) == 65532
    && variables.pod.securityContext.?runAsGroup.orValue(65532) == 65532
    && variables.pod.securityContext.?fsGroup.orValue(65532) == 65532)
  message: "files: the operator's containers run as 65532, if they name a user, with a read-only root file system"
  reason: Forbidden
- expression: >-
    request.operation != 'CREATE' || variables.containers.all(container,
    ['startupProbe', 'readinessProbe', 'livenessProbe'].all(probe, !(probe in dyn(container))
    || ('httpGet' in dyn(container)[probe] && dyn(container)[probe].httpGet.all(key, key in ['path', 'port', 'scheme'])
    && dyn(container)[probe].httpGet.path == '/health' && dyn(container)[probe].httpGet.port == 'http'))
    && (!has(container.lifecycle) || (dyn(container.lifecycle).all(key, key == 'preStop')
    && dyn(container.lifecycle.preStop).all(key, key == 'sleep'))))
  message: "probe: the kubelet asks the operator's servers for /health, and waits before it stops them"
  reason: Forbidden
- expression: >-
    request.operation != 'CREATE' || (request.resource.resource == 'jobs'
    ? variables.pod.?initContainers.orValue([]).size() == 0
    : variables.pod.?initContainers.orValue([]).size() == 1 && variables.pod.initContainers.all(container,
    container.?command.orValue([]).size() > 4
    && container.command[0] + ' ' + container.command[1] + ' ' + container.command[2] + ' ' + container.command[3]
    == 'python -P -m finetune_trainer.serving.verify'))
  message: "verify: the operator's servers, and no other pods, have an init container that verifies the model"
  reason: Forbidden
- expression: >-
    request.operation != 'CREATE' || (!variables.pod.?priorityClassName.orValue('').startsWith('system-')
    && variables.pod.?terminationGracePeriodSeconds.orValue(30) <= 86400)
  message: "priority: the operator's pods have no priority of the system, and stop within a day"
  reason: Forbidden
- expression: >-
    request.operation != 'CREATE' || (request.resource.resource == 'jobs'
    ? !('finetune.dev/server' in object.spec.template.metadata.?labels.orValue({}))
    : dyn(object.spec.selector) == {'matchLabels': {'finetune.dev/server': object.metadata.name}})
  message: "server: only the pods of the Deployment with this name have the label finetune.dev/server"
  reason: Forbidden
- expression: >-
    request.operation != 'CREATE' || (dyn(object.spec).all(key, key in (request.resource.resource == 'jobs'
    ? ['backoffLimit', 'completions', 'parallelism', 'completionMode', 'successPolicy', 'podReplacementPolicy',
    'podFailurePolicy', 'template', 'selector', 'suspend', 'manualSelector']
    : ['replicas', 'selector', 'template', 'strategy', 'revisionHistoryLimit', 'progressDeadlineSeconds']))
    && !object.spec.?manualSelector.orValue(false))
  message: "field: the operator's Jobs and Deployments have none but the fields in its chart's templates/_built_fields.tpl"
  reason: Forbidden
- expression: >-
    request.resource.resource == 'jobs' ? object.spec.?parallelism.orValue(1) <= 64
    : object.spec.?replicas.orValue(1) <= 64
  message: "number: the operator's Jobs and Deployments have at most 64 pods"
  reason: Forbidden
{{- end }}

{{- define "finetune.builtServiceRules" }}
- expression: >-
    request.operation != 'CREATE' || (
    dyn(object.spec).all(key, key in ['selector', 'ports', 'type', 'clusterIP', 'clusterIPs', 'ipFamilies',
    'ipFamilyPolicy', 'sessionAffinity', 'internalTrafficPolicy', 'publishNotReadyAddresses'])
    && object.spec.?ports.orValue([]).all(port, (port.?name.orValue('') == 'http' && port.port == 8000
    && dyn(port.targetPort) == 'http') || port.?name.orValue('') == 'rendezvous'))
  message: "field: the operator's Services have none but the fields and ports in its chart's templates/_built_fields.tpl"
  reason: Forbidden
- expression: >-
    object.spec.selector.size() == ('finetune.dev/server' in object.spec.selector ? 1 : 2)
  message: "selector: the operator's Services select by the labels of finetune.dev alone"
  reason: Forbidden
- expression: >-
    object.metadata.?annotations.orValue({}).all(key, key.startsWith('finetune.dev/')
    || (request.operation == 'UPDATE' && oldObject.metadata.?annotations[?key].orValue('')
    == object.metadata.annotations[key]))
  message: "annotation: the operator writes only annotations of the group finetune.dev on a Service"
  reason: Forbidden
{{- end }}

{{- /* The API server itself adds the finalizer of claims. */}}
{{- define "finetune.builtObjectRules" }}
- expression: >-
    request.operation == 'DELETE' || object.metadata.?finalizers.orValue([]).all(finalizer,
    (request.operation == 'CREATE' && finalizer == 'kubernetes.io/pvc-protection')
    || (request.operation == 'UPDATE' && finalizer in oldObject.metadata.?finalizers.orValue([])))
  message: "finalizer: the operator adds no finalizer"
  reason: Forbidden
{{- end }}
