{{/* Parts of every pod: what Pod Security "restricted" asks for, settings, secrets. */}}

{{- define "nearkin.podSecurity" -}}
serviceAccountName: {{ include "nearkin.serviceAccount" . }}
automountServiceAccountToken: false
# Variables of Services begin with their names: NEARKIN_* ones would be taken for settings, and refused.
enableServiceLinks: false
{{- with .Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile:
    type: RuntimeDefault
{{- end -}}

{{- define "nearkin.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
runAsNonRoot: true
capabilities:
  drop: [ALL]
{{- end -}}

{{/* Where a pod may run. */}}
{{- define "nearkin.placement" -}}
{{- with .priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* Variables with secrets, by reference. */}}
{{- define "nearkin.secretEnv" -}}
{{- with .Values.secrets.kafka }}{{ if .name }}
{{ include "nearkin.envFrom" (list "NEARKIN_KAFKA__SASL_USERNAME" .name .usernameKey) }}
{{ include "nearkin.envFrom" (list "NEARKIN_KAFKA__SASL_PASSWORD" .name .passwordKey) }}
{{- end }}{{ end }}
{{- with .Values.secrets.redis }}{{ if .name }}
{{- if .usernameKey }}
{{ include "nearkin.envFrom" (list "NEARKIN_REDIS__USERNAME" .name .usernameKey) }}
{{- end }}
{{ include "nearkin.envFrom" (list "NEARKIN_REDIS__PASSWORD" .name .passwordKey) }}
{{- end }}{{ end }}
{{- with .Values.secrets.objectStore }}{{ if .name }}
{{ include "nearkin.envFrom" (list "NEARKIN_OBJECT_STORE__ACCESS_KEY_ID" .name .accessKeyIdKey) }}
{{ include "nearkin.envFrom" (list "NEARKIN_OBJECT_STORE__SECRET_ACCESS_KEY" .name .secretAccessKeyKey) }}
{{- end }}{{ end }}
{{- end -}}

{{/* The key of an encrypted store: of services alone, the Job of topics opens none. */}}
{{- define "nearkin.keyEnv" -}}
{{- $encryption := (.Values.config.storage).encryption | default "none" -}}
{{- if and .Values.secrets.encryption.name (eq $encryption "none") -}}
{{- fail "secrets.encryption.name: is set, and config.storage.encryption is none: set aes-256-gcm" -}}
{{- end -}}
{{- with .Values.secrets.encryption }}{{ if .name }}
{{ include "nearkin.envFrom" (list "NEARKIN_STORAGE__KEY" .name .key) }}
{{- end }}{{ end }}
{{- end -}}

{{- define "nearkin.envFrom" -}}
- name: {{ index . 0 }}
  valueFrom:
    secretKeyRef:
      name: {{ index . 1 | quote }}
      key: {{ index . 2 | quote }}
{{- end -}}

{{- define "nearkin.mounts" -}}
- name: config
  mountPath: /etc/nearkin/config
  readOnly: true
- name: scratch
  mountPath: /tmp
{{- if .Values.secrets.certificates.name }}
- name: certificates
  mountPath: /etc/nearkin/certificates
  readOnly: true
{{- end }}
{{- end -}}

{{/* (root, name of the ConfigMap, bytes of scratch) */}}
{{- define "nearkin.volumes" -}}
{{- $root := index . 0 -}}
# A folder, not a file: only folders follow the ConfigMap.
- name: config
  configMap:
    name: {{ index . 1 }}
- name: scratch
  emptyDir:
    sizeLimit: {{ index . 2 }}
{{- with $root.Values.secrets.certificates.name }}
- name: certificates
  secret:
    secretName: {{ . | quote }}
    defaultMode: 0440
{{- end }}
{{- end -}}

{{/* How evenly pods lie over zones and nodes: (root, component, topologySpread, label of a revision or ""). */}}
{{- define "nearkin.spread" -}}
{{- $root := index . 0 -}}
{{- $component := index . 1 -}}
{{- $spread := index . 2 -}}
{{- $revision := index . 3 -}}
{{- range list "topology.kubernetes.io/zone" "kubernetes.io/hostname" }}
- topologyKey: {{ . }}
  maxSkew: {{ $spread.maxSkew }}
  whenUnsatisfiable: {{ $spread.whenUnsatisfiable }}
  labelSelector:
    matchLabels:
      {{- include "nearkin.selector" $root | nindent 6 }}
      app.kubernetes.io/component: {{ $component }}
  {{- with $revision }}
  matchLabelKeys: [{{ . }}]
  {{- end }}
{{- end }}
{{- end -}}

{{/* Probes of a container on one of its ports. */}}
{{- define "nearkin.probes" -}}
# It waits up to 120 s for servers that are not up yet, and then names the missing one.
startupProbe:
  httpGet: {path: /livez, port: {{ . }}}
  periodSeconds: 2
  timeoutSeconds: 5
  failureThreshold: 90
livenessProbe:
  httpGet: {path: /livez, port: {{ . }}}
  periodSeconds: 15
  timeoutSeconds: 10
  failureThreshold: 4
readinessProbe:
  httpGet: {path: /readyz, port: {{ . }}}
  periodSeconds: 10
  timeoutSeconds: 10
  failureThreshold: 3
{{- end -}}
