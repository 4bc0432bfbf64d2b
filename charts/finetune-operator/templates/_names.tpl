{{- /* 55 characters: the Service's name is this and -metrics, and may have 63 and no dot. A release's name has 53 at most, so
that all of it is in here and two releases never share a name. */}}
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
