{{/* Names and labels. A selector never changes within a release: Deployments refuse that. */}}

{{- define "nearkin.fullname" -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 50 | trimSuffix "-" -}}
{{- else if contains $name .Release.Name -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 50 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "nearkin.selector" -}}
app.kubernetes.io/name: {{ default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "nearkin.labels" -}}
{{ include "nearkin.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "nearkin.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "nearkin.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{- define "nearkin.image" -}}
{{- with .Values.image -}}
{{- if .digest -}}
{{- printf "%s@%s" .repository .digest -}}
{{- else -}}
{{- printf "%s:%s" .repository (default $.Chart.AppVersion .tag) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Services by name: the module that runs one, and what waits for it in Kafka (its group is named as it is). */}}
{{- define "nearkin.services" -}}
gateway: {module: nearkin_gateway}
chunker: {module: nearkin_chunker, waits: {chunker: frames}}
dedup: {module: nearkin_dedup, waits: {dedup: segments}}
resemblance: {module: nearkin_resemblance, waits: {resemblance: fresh}}
delta: {module: nearkin_delta, waits: {delta: paired, committer: placed}}
janitor: {module: nearkin_janitor}
ingest: {module: nearkin_gateway.ingest_worker}
{{- end -}}

{{/* The services that run, each with its values over `defaults`, as YAML. */}}
{{- define "nearkin.running" -}}
{{- $found := dict -}}
{{- range $name, $what := include "nearkin.services" . | fromYaml -}}
{{- $values := mergeOverwrite (deepCopy $.Values.defaults) (deepCopy (index $.Values $name)) -}}
{{- if and $values.enabled (or (ne $name "ingest") (dig "ingest" "topics" false $.Values.config)) -}}
{{- $_ := set $found $name (merge (dict "values" $values) $what) -}}
{{- end -}}
{{- end -}}
{{- toYaml $found -}}
{{- end -}}

{{/* More members of a group than the topic has partitions would idle. */}}
{{- define "nearkin.checkReplicas" -}}
{{- $partitions := int (dig "kafka" "partitions" 4 .Values.config) -}}
{{- range $name, $service := include "nearkin.running" . | fromYaml -}}
{{- if or $service.waits (eq $name "ingest") -}}
{{- $bound := eq $name "ingest" | ternary (int (dig "partitions" 12 $service.values)) $partitions -}}
{{- $where := eq $name "ingest" | ternary "ingest.partitions" "config.kafka.partitions" -}}
{{- with $service.values -}}
{{- if and (not .autoscaling.enabled) (gt (int .replicas) $bound) -}}
{{- fail (printf "%s.replicas %d: want at most %s (%d); more would idle" $name (int .replicas) $where $bound) -}}
{{- end -}}
{{- if and .autoscaling.enabled (gt (int .autoscaling.maxReplicas) $bound) -}}
{{- fail (printf "%s.autoscaling.maxReplicas %d: want at most %s (%d); more would idle" $name (int .autoscaling.maxReplicas) $where $bound) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
