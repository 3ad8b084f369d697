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

{{/* The StatefulSet of index shards and its Service. Its pods' names, and its name with a hash of 11, are labels: 63 at most. */}}
{{- define "nearkin.shards" -}}
{{- printf "%s-index-shard" (include "nearkin.fullname" . | trunc 40 | trimSuffix "-") -}}
{{- end -}}

{{/* Values of a release before this chart had shards (--reuse-values) have none. */}}
{{- define "nearkin.shardCount" -}}
{{- int (.Values.indexShards).replicas -}}
{{- end -}}

{{- define "nearkin.shardPort" -}}
7420
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
gateway: {module: nearkin.workers.gateway}
chunker: {module: nearkin_chunker, waits: {chunker: frames}}
dedup: {module: nearkin_dedup, waits: {dedup: segments}}
resemblance: {module: nearkin_resemblance, waits: {resemblance: fresh}}
delta: {module: nearkin.workers.pipeline, arguments: [--stages, delta+committer], waits: {delta: paired, committer: placed}}
pipeline:
  module: nearkin.workers.pipeline
  arguments: [--stages, chunker+dedup+resemblance+delta+committer]
  waits: {chunker: frames, dedup: segments, resemblance: fresh, delta: paired, committer: placed}
maintenance: {module: nearkin.workers.maintenance}
ingest: {module: nearkin_ingest}
{{- end -}}

{{/* The services that run, each with its values over `defaults`, as YAML. */}}
{{- define "nearkin.running" -}}
{{- $found := dict -}}
{{- $stages := dig "pipeline" "stages" "fused" .Values.config -}}
{{- $unused := list "pipeline" -}}
{{- if eq $stages "fused" -}}
{{- $unused = list "chunker" "dedup" "resemblance" "delta" -}}
{{- else if ne $stages "split" -}}
{{- fail (printf "config.pipeline.stages %s: the chart knows fused and split" $stages) -}}
{{- end -}}
{{- range $name, $what := include "nearkin.services" . | fromYaml -}}
{{- $values := mergeOverwrite (deepCopy $.Values.defaults) (deepCopy (index $.Values $name)) -}}
{{- if and $values.enabled (not (has $name $unused)) (or (ne $name "ingest") (dig "ingest" "topics" false $.Values.config)) -}}
{{- $_ := set $found $name (merge (dict "values" $values) $what) -}}
{{- end -}}
{{- end -}}
{{- toYaml $found -}}
{{- end -}}

{{/* More members of a group than the topic has partitions would idle. */}}
{{- define "nearkin.checkReplicas" -}}
{{- $partitions := int (dig "kafka" "partitions" 4 .Values.config) -}}
{{- range $name, $service := include "nearkin.running" . | fromYaml -}}
{{- with $service.values.autoscaling -}}
{{- if and .enabled (gt (int .minReplicas) (int .maxReplicas)) -}}
{{- fail (printf "%s.autoscaling.minReplicas %d: want at most maxReplicas (%d)" $name (int .minReplicas) (int .maxReplicas)) -}}
{{- end -}}
{{- end -}}
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

{{/* What the settings allow, and a pod cannot have. */}}
{{- define "nearkin.checkSettings" -}}
{{- $config := .Values.config -}}
{{- range $name, $refusal := .Files.Get "files/removed_settings.json" | fromJson -}}
{{- $section := index $config (splitList "." $name | first) -}}
{{- if and (kindIs "map" $section) (hasKey $section (splitList "." $name | last)) -}}
{{- fail (printf "config.%s: %s" $name $refusal) -}}
{{- end -}}
{{- end -}}
{{- $gateway := int (dig "gateway" "port" 8080 $config) -}}
{{- $monitor := int (dig "monitor" "port" 9090 $config) -}}
{{- if or (lt $gateway 1) (lt $monitor 1) (eq $gateway $monitor) -}}
{{- fail (printf "config.gateway.port %d, config.monitor.port %d: want two ports, 1 at least" $gateway $monitor) -}}
{{- end -}}
{{- $stops := int (dig "gateway" "shutdown_seconds" 30 $config) -}}
{{- $grace := int (dig "terminationGracePeriodSeconds" .Values.defaults.terminationGracePeriodSeconds .Values.gateway) -}}
{{- if gt (add $stops 15) (int64 $grace) -}}
{{- fail (printf "config.gateway.shutdown_seconds %d: want gateway.terminationGracePeriodSeconds (%d) to be 15 more, or it is killed before" $stops $grace) -}}
{{- end -}}
{{- if ne (include "nearkin.shardCount" .) "0" -}}
{{- range $name := list "backend" "shards" -}}
{{- if hasKey ($config.index | default dict) $name -}}
{{- fail (printf "config.index.%s: indexShards.replicas is set, and the chart writes it; leave it out" $name) -}}
{{- end -}}
{{- end -}}
{{- if eq (toString $monitor) (include "nearkin.shardPort" .) -}}
{{- fail (printf "config.monitor.port %d: index shards answer calls there; use another port" $monitor) -}}
{{- end -}}
{{- end -}}
{{- if eq (dig "gateway" "ingest" "kafka" $config) "embedded" -}}
{{- fail "config.gateway.ingest embedded: each gateway would be a store of its own; leave it out, the chart runs the pipeline" -}}
{{- end -}}
{{- if not (contains "://" (dig "object_store" "url" "s3://" $config)) -}}
{{- fail (printf "config.object_store.url %s: want a bucket (s3://...); pods share no folder" $config.object_store.url) -}}
{{- end -}}
{{- if dig "storage" "key_file" "" $config -}}
{{- fail "config.storage.key_file: no pod has that file; name a Secret in secrets.encryption.name" -}}
{{- end -}}
{{- if and (ne (dig "storage" "encryption" "none" $config) "none") (not .Values.secrets.encryption.name) -}}
{{- fail "secrets.encryption.name: want a Secret with the key; config.storage.encryption is set" -}}
{{- end -}}
{{- range $where := list "podLabels" "commonLabels" -}}
{{- range $label := list "app.kubernetes.io/name" "app.kubernetes.io/instance" "app.kubernetes.io/component" -}}
{{- if hasKey (index $.Values $where) $label -}}
{{- fail (printf "%s %s: selectors go by it; use another label" $where $label) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
