{{- define "kvroute.name" -}}
{{- if contains .Chart.Name .Release.Name }}{{ .Release.Name | trunc 53 | trimSuffix "-" }}
{{- else }}{{ printf "%s-%s" .Release.Name .Chart.Name | trunc 53 | trimSuffix "-" }}{{ end }}
{{- end }}

{{- define "kvroute.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "kvroute.labels" -}}
{{ include "kvroute.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{- define "kvroute.account" -}}
{{- if .Values.serviceAccount.create }}{{ .Values.serviceAccount.name | default (include "kvroute.name" .) }}
{{- else }}{{ .Values.serviceAccount.name | default "default" }}{{ end }}
{{- end }}

{{- define "kvroute.image" -}}
{{- with .Values.image -}}
{{ .repository }}{{ if .digest }}@{{ .digest }}{{ else }}:{{ .tag | default $.Chart.AppVersion }}{{ end }}
{{- end }}
{{- end }}

{{- define "kvroute.keys" -}}
{{ .Values.keys.existingSecret | default (printf "%s-keys" (include "kvroute.name" .)) }}
{{- end }}

{{- /* What the chart knows, and over it what the user says. */ -}}
{{- define "kvroute.config" -}}
{{- $pairs := list }}
{{- range $name, $value := .Values.engines.labels }}{{ $pairs = append $pairs (printf "%s=%s" $name $value) }}{{ end }}
{{- $found := dict "selector" (join "," $pairs) "port" .Values.engines.port }}
{{- $server := dict "host" "0.0.0.0" "port" 8000 "client_api_key" "${CLIENT_KEY}" "operator_api_key" "${OPERATOR_KEY}" }}
{{- $_ := set $server "timeouts" (dict "shutdown_grace_s" (.Values.shutdownGraceSeconds | int)) }}
{{- if .Values.tls.secret }}
{{- $tls := dict "certificate" "/etc/kvroute-tls/tls.crt" "key" "/etc/kvroute-tls/tls.key" }}
{{- if .Values.tls.clientCA }}{{ $_ := set $tls "client_ca" "/etc/kvroute-client-ca/ca.crt" }}{{ end }}
{{- $_ := set $server "tls" $tls }}
{{- end }}
{{- $known := dict "server" $server "discovery" (dict "kubernetes" (list $found)) }}
{{- toYaml (mergeOverwrite $known (deepCopy .Values.config)) }}
{{- end }}
