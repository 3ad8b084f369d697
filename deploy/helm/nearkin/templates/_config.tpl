{{/* The file of settings, and what of it needs a restart. */}}

{{- define "nearkin.tomlValue" -}}
{{- if kindIs "map" . -}}
{ {{- range $number, $name := keys . | sortAlpha }}{{ if $number }},{{ end }} {{ toJson $name }} = {{ include "nearkin.tomlValue" (index $ $name) }}{{ end }} }
{{- else if kindIs "slice" . -}}
[{{- range $number, $item := . }}{{ if $number }}, {{ end }}{{ include "nearkin.tomlValue" $item }}{{ end }}]
{{- else if or (kindIs "string" .) (kindIs "bool" .) -}}
{{- toJson . -}}
{{- else if eq (float64 .) (floor .) -}}
{{- int64 . -}}
{{- else -}}
{{- toJson . -}}
{{- end -}}
{{- end -}}

{{- define "nearkin.toml" -}}
{{- range $name, $value := .Values.config }}{{ if not (kindIs "map" $value) }}
{{- $name }} = {{ include "nearkin.tomlValue" $value }}
{{ end }}{{ end }}
{{- range $section, $values := .Values.config }}{{ if and (kindIs "map" $values) $values }}
[{{ $section }}]
{{ range $name, $value := $values -}}
{{ $name }} = {{ include "nearkin.tomlValue" $value }}
{{ end }}{{ end }}{{ end }}
{{- end -}}

{{/* Write the index shards of the release into settings: (root, settings, which change). */}}
{{- define "nearkin.withShards" -}}
{{- $root := index . 0 -}}
{{- $config := index . 1 -}}
{{- $name := include "nearkin.shards" $root -}}
{{- $urls := list -}}
{{- range $number := until (int (include "nearkin.shardCount" $root)) -}}
{{- $urls = append $urls (printf "http://%s-%d.%s.%s.svc:%s" $name $number $name $root.Release.Namespace (include "nearkin.shardPort" $root)) -}}
{{- end -}}
{{- if $urls -}}
{{- $_ := set $config "index" (merge (dict "backend" "shards" "shards" $urls) ($config.index | default dict)) -}}
{{- end -}}
{{- end -}}

{{/* nearkin_shared.config.settings.HOT_FIELDS: what running services take from the changed file. */}}
{{- define "nearkin.hotFields" -}}
- base.policy
- block.level
- delta.codec
- delta.max_depth
- features.algorithm
- service.paused
- service.read_only
{{- end -}}

{{/* A digest of all settings but the hot ones: pods carry it, so that a change of these alone restarts none. */}}
{{- define "nearkin.coldChecksum" -}}
{{- $cold := deepCopy .Values.config -}}
{{- include "nearkin.withShards" (list . $cold) -}}
{{- range $field := include "nearkin.hotFields" . | fromYamlArray -}}
{{- $parts := splitList "." $field -}}
{{- with index $cold (first $parts) -}}
{{- $_ := unset . (last $parts) -}}
{{- end -}}
{{- end -}}
{{- range $section, $values := $cold -}}
{{- if and (kindIs "map" $values) (not $values) -}}
{{- $_ := unset $cold $section -}}
{{- end -}}
{{- end -}}
{{- toJson $cold | sha256sum -}}
{{- end -}}
