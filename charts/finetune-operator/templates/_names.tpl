{{- /* At most 55 characters without a dot: the Service is called NAME-metrics, and a Service's name may have 63 characters.
Helm limits a release's name to 53 characters, so it is never cut, and two releases never share a name. The schema limits
fullnameOverride likewise. */}}
{{- define "finetune.name" -}}
{{- $name := ternary .Release.Name (printf "%s-%s" .Release.Name .Chart.Name) (contains .Chart.Name .Release.Name) }}
{{- .Values.fullnameOverride | default ($name | replace "." "-" | trunc 55 | trimAll "-") }}
{{- end }}

{{- define "finetune.serviceAccount" -}}
{{ .Values.serviceAccount.name | default (include "finetune.name" .) }}
{{- end }}

{{- define "finetune.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end }}

{{- /* A label has no plus sign. Flux adds +COMMIT to the version with reconcileStrategy: Revision. */}}
{{- define "finetune.labels" -}}
{{ include "finetune.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | quote }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- /* The common labels, and the object's own labels, which win. */}}
{{- define "finetune.labelsWith" -}}
{{ merge (dict) (.more | default dict) (include "finetune.labels" .root | fromYaml) | toYaml }}
{{- end }}

{{- define "finetune.image" -}}
{{- with .image.registry }}{{ . | trimSuffix "/" }}/{{ end }}{{ .image.repository }}:{{ .image.tag | default .default }}
{{- with .image.digest }}@{{ . }}{{ end }}
{{- end }}

{{- /* The trainer's image without CUDA. Its empty values take the values of the image with CUDA. */}}
{{- define "finetune.cpuImage" -}}
{{- $with := .Values.trainer.image }}{{ $without := .Values.trainer.cpuImage }}
{{- $beside := dict "registry" $with.registry "repository" (printf "%s-cpu" $with.repository) "tag" $with.tag }}
{{- range $key, $value := $without }}{{ with $value }}{{ $_ := set $beside $key . }}{{ end }}{{ end }}
{{- include "finetune.image" (dict "image" $beside "default" .Chart.AppVersion) }}
{{- end }}

{{- /* Without a cluster (`helm template`) the capabilities list no kinds. Every version in Chart.yaml's kubeVersion has the
kind, so it is rendered then. */}}
{{- define "finetune.hasPolicies" -}}
{{- $kinds := .Capabilities.APIVersions }}
{{- if or ($kinds.Has "admissionregistration.k8s.io/v1/ValidatingAdmissionPolicy") (not ($kinds.Has "v1/Pod")) }}true{{ end }}
{{- end }}

{{- /* Whether a policy, and not the CRD, has the rules between fields of a pipeline. */}}
{{- define "finetune.rulesPolicy" -}}
{{- $mode := .Values.crds.policy | toString }}
{{- if or (eq $mode "true") (and (eq $mode "auto") (include "finetune.hasPolicies" .)) }}true{{ end }}
{{- end }}

{{- /* The operator's option --placement. A schema cannot see that two names are equal. */}}
{{- define "finetune.placement" -}}
{{- $names := list }}
{{- range .Values.placement.nodeClasses }}
{{- if has .name $names }}{{ fail (printf "placement.nodeClasses: the name %s is not unique: rename one of them" .name) }}{{ end }}
{{- $names = append $names .name }}
{{- end }}
{{- printf "--placement=%s" (toJson (omit .Values.placement "priceConfigMap")) }}
{{- end }}

{{- /* Without the fields that OpenShift's restricted-v2 sets itself, if podSecurity.setUser is false. */}}
{{- define "finetune.podSecurityContext" -}}
{{- if .Values.podSecurity.setUser }}{{ toYaml .Values.podSecurityContext }}
{{- else }}{{ toYaml (omit .Values.podSecurityContext "runAsUser" "runAsGroup" "fsGroup") }}{{ end }}
{{- end }}

{{- /* The value `defaults` with the variables and the volume of `proxy` and `trustedCAs`. An entry of defaults.podDefaults with
the same name or path wins. */}}
{{- define "finetune.defaults" -}}
{{- $defaults := .Values.defaults | default dict }}
{{- $pod := deepCopy ($defaults.podDefaults | default dict) }}
{{- $values := dict }}
{{- with .Values.proxy }}
{{- if and .noProxy (not (or .http .https)) }}{{ fail "proxy.noProxy: has no effect without proxy.http or proxy.https: set either, or remove noProxy" }}{{ end }}
{{- if or .http .https }}
{{- $inside := list "localhost" "127.0.0.1" "::1" ".svc" ".cluster.local" "169.254.169.254" "169.254.170.23" "metadata.google.internal" }}
{{- $values = dict "HTTP_PROXY" .http "HTTPS_PROXY" .https "NO_PROXY" (join "," (concat $inside (.noProxy | default list))) }}
{{- end }}
{{- end }}
{{- $volumes := list }}
{{- $mounts := list }}
{{- with .Values.trustedCAs }}
{{- if .configMap }}
{{- $folder := "/etc/finetune/trusted-cas" }}
{{- range list "SSL_CERT_FILE" "REQUESTS_CA_BUNDLE" "CURL_CA_BUNDLE" "AWS_CA_BUNDLE" }}
{{- $_ := set $values . (printf "%s/ca.crt" $folder) }}
{{- end }}
{{- $items := list (dict "key" .key "path" "ca.crt") }}
{{- $volumes = list (dict "name" "trusted-cas" "configMap" (dict "name" .configMap "items" $items)) }}
{{- $mounts = list (dict "name" "trusted-cas" "mountPath" $folder) }}
{{- end }}
{{- end }}
{{- $variables := list }}
{{- range $name, $value := $values }}
{{- if $value }}{{ $variables = append $variables (dict "name" $name "value" $value) }}{{ end }}
{{- end }}
{{- range list (list "env" "name" $variables) (list "volumes" "name" $volumes) (list "volumeMounts" "mountPath" $mounts) }}
{{- $field := index . 0 }}
{{- $key := index . 1 }}
{{- $own := get $pod $field | default list }}
{{- $taken := list }}
{{- range $own }}{{ $taken = append $taken (get . $key) }}{{ end }}
{{- $more := list }}
{{- range index . 2 }}{{ if not (has (get . $key) $taken) }}{{ $more = append $more . }}{{ end }}{{ end }}
{{- if $more }}{{ $_ := set $pod $field (concat $more $own) }}{{ end }}
{{- end }}
{{- toJson (merge (dict "podDefaults" $pod) (omit $defaults "podDefaults")) }}
{{- end }}
