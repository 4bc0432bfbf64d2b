{{- /* At most 55 characters without a dot: the Service is called NAME-metrics, and a Service's name may have 63 characters.
Helm limits a release's name to 53 characters, so it is never cut, and two releases never share a name. */}}
{{- define "finetune.name" -}}
{{- $name := ternary .Release.Name (printf "%s-%s" .Release.Name .Chart.Name) (contains .Chart.Name .Release.Name) }}
{{- $name | replace "." "-" | trunc 55 | trimAll "-" }}
{{- end }}

{{- define "finetune.serviceAccount" -}}
{{ .Values.serviceAccount.name | default (include "finetune.name" .) }}
{{- end }}

{{- define "finetune.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "finetune.labels" -}}
{{ include "finetune.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | quote }}
{{- end }}

{{- define "finetune.image" -}}
{{ printf "%s:%s" .image.repository (.image.tag | default .default) }}
{{- end }}
