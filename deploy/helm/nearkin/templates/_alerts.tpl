{{/* Alerts; docs/how-to/operate-services.md has what to do about each, under its name. */}}
{{- define "nearkin.alerts" -}}
{{- $s := default (printf "namespace=%q,job=%q" .Release.Namespace .Release.Name) .Values.monitoring.rules.selector -}}
{{- $pages := .Values.monitoring.rules.runbooks -}}
{{- $bounds := .Values.monitoring.rules.thresholds -}}
{{- $groups := printf "%s(.*)" (dig "kafka" "topic_prefix" "nearkin." .Values.config | regexQuoteMeta) -}}
- alert: NearkinDown
  expr: min by (component, pod) (up{ {{- $s -}} }) == 0
  for: 5m
  labels: {severity: critical}
  annotations:
    runbook_url: {{ printf "%s#nearkindown" $pages | quote }}
    summary: {{ "{{ $labels.pod }} does not answer" | quote }}
- alert: NearkinBehind
  expr: sum by (group) (max by (group, topic, partition) (nearkin_lag_records{ {{- $s -}} })) > {{ $bounds.lagRecords }}
  for: 15m
  labels: {severity: warning}
  annotations:
    runbook_url: {{ printf "%s#nearkinbehind" $pages | quote }}
    summary: {{ "{{ $labels.group }} is {{ $value | humanize }} records behind" | quote }}
- alert: NearkinStuck
  expr: >-
    sum by (stage) (label_replace(max by (group, topic, partition) (nearkin_lag_records{ {{- $s -}} ,group=~{{ $groups | quote -}} }),
    "stage", "$1", "group", {{ $groups | quote }})) > 0
    unless on (stage) sum by (stage) (rate(nearkin_records_total{ {{- $s -}} }[10m])) > 0
  for: 10m
  labels: {severity: critical}
  annotations:
    runbook_url: {{ printf "%s#nearkinstuck" $pages | quote }}
    summary: {{ "{{ $labels.stage }} has records waiting and takes none" | quote }}
- alert: NearkinLagUnknown
  expr: absent(nearkin_lag_observed_timestamp_seconds{ {{- $s -}} }) or time() - max(nearkin_lag_observed_timestamp_seconds{ {{- $s -}} }) > 300
  for: 10m
  labels: {severity: warning}
  annotations:
    runbook_url: {{ printf "%s#nearkinlagunknown" $pages | quote }}
    summary: No maintenance worker reads from Kafka how far the stages are behind
- alert: NearkinOldRecords
  expr: max by (stage) (nearkin_record_age_seconds{ {{- $s -}} }) > {{ $bounds.ageSeconds }}
  for: 15m
  labels: {severity: warning}
  annotations:
    runbook_url: {{ printf "%s#nearkinoldrecords" $pages | quote }}
    summary: {{ "{{ $labels.stage }} works on records that are {{ $value | humanizeDuration }} old" | quote }}
- alert: NearkinRetentionNear
  expr: max by (group) (nearkin_lag_old_records{ {{- $s -}} }) > 0
  labels: {severity: critical}
  annotations:
    runbook_url: {{ printf "%s#nearkinretentionnear" $pages | quote }}
    summary: {{ "Kafka will drop what {{ $labels.group }} has not taken: half of kafka.retention_hours is over" | quote }}
- alert: NearkinTrimFails
  expr: time() - (max(nearkin_trim_timestamp_seconds{ {{- $s -}} }) > 0) > 900
  for: 5m
  labels: {severity: warning}
  annotations:
    runbook_url: {{ printf "%s#nearkintrimfails" $pages | quote }}
    summary: Handled records stay in Kafka, whose disks fill for kafka.retention_hours
- alert: NearkinDeadLetters
  expr: sum by (stage) (increase(nearkin_dead_letters_total{ {{- $s -}} }[15m])) > 0
  labels: {severity: warning}
  annotations:
    runbook_url: {{ printf "%s#nearkindeadletters" $pages | quote }}
    summary: {{ "{{ $labels.stage }} put {{ $value | humanize }} records aside" | quote }}
- alert: NearkinBlobsFail
  expr: sum(increase(nearkin_blobs_total{ {{- $s -}} ,state="failed"}[15m])) > 0
  labels: {severity: warning}
  annotations:
    runbook_url: {{ printf "%s#nearkinblobsfail" $pages | quote }}
    summary: {{ "{{ $value | humanize }} uploads ended as failed" | quote }}
- alert: NearkinCorruption
  expr: sum by (where) (increase(nearkin_corrupt_total{ {{- $s -}} }[1h])) > 0
  labels: {severity: critical}
  annotations:
    runbook_url: {{ printf "%s#nearkincorruption" $pages | quote }}
    summary: {{ "Bytes are not what they should be: {{ $labels.where }}" | quote }}
- alert: NearkinIndexIncomplete
  expr: min(nearkin_index_complete{ {{- $s -}} }) == 0
  for: 30m
  labels: {severity: warning}
  annotations:
    runbook_url: {{ printf "%s#nearkinindexincomplete" $pages | quote }}
    summary: The index in Redis is being rebuilt; less is recognised meanwhile
- alert: NearkinRebuildFails
  expr: sum(increase(nearkin_index_rebuilds_total{ {{- $s -}} ,outcome="failed"}[15m])) > 3
  labels: {severity: critical}
  annotations:
    runbook_url: {{ printf "%s#nearkinrebuildfails" $pages | quote }}
    summary: The index in Redis cannot be rebuilt
- alert: NearkinDependencyLost
  expr: sum by (stage) (increase(nearkin_restarts_total{ {{- $s -}} }[15m])) > 3
  labels: {severity: warning}
  annotations:
    runbook_url: {{ printf "%s#nearkindependencylost" $pages | quote }}
    summary: {{ "{{ $labels.stage }} loses Kafka, Redis or the object store again and again" | quote }}
- alert: NearkinSlowSteps
  expr: histogram_quantile(0.99, sum by (stage, le) (rate(nearkin_step_seconds_bucket{ {{- $s -}} }[10m]))) > {{ $bounds.stepSeconds }}
  for: 15m
  labels: {severity: warning}
  annotations:
    runbook_url: {{ printf "%s#nearkinslowsteps" $pages | quote }}
    summary: {{ "One of a hundred batches takes {{ $labels.stage }} {{ $value | humanizeDuration }}" | quote }}
- alert: NearkinSettingsDiffer
  expr: count(count by (revision) (nearkin_config_info{ {{- $s -}} })) > 1
  for: 15m
  labels: {severity: warning}
  annotations:
    runbook_url: {{ printf "%s#nearkinsettingsdiffer" $pages | quote }}
    summary: {{ "{{ $value }} revisions of the settings are in force at the same time" | quote }}
- alert: NearkinSettingsRefused
  expr: sum(increase(nearkin_config_refused_total{ {{- $s -}} }[15m])) > 0
  labels: {severity: warning}
  annotations:
    runbook_url: {{ printf "%s#nearkinsettingsrefused" $pages | quote }}
    summary: A change of the settings was refused; those before it are in force
- alert: NearkinGcFails
  expr: sum(increase(nearkin_gc_runs_total{ {{- $s -}} ,outcome="failed"}[6h])) > 1
  labels: {severity: warning}
  annotations:
    runbook_url: {{ printf "%s#nearkingcfails" $pages | quote }}
    summary: {{ "{{ $value | humanize }} GC runs failed" | quote }}
- alert: NearkinGatewayErrors
  expr: >-
    sum(rate(nearkin_http_requests_total{ {{- $s -}} ,status=~"5.."}[5m]))
    > {{ $bounds.errorPercent }} / 100 * sum(rate(nearkin_http_requests_total{ {{- $s -}} }[5m]))
  for: 10m
  labels: {severity: critical}
  annotations:
    runbook_url: {{ printf "%s#nearkingatewayerrors" $pages | quote }}
    summary: More than {{ $bounds.errorPercent }} of a hundred requests fail
{{- end -}}
