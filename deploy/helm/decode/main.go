// decode reads Kubernetes manifests from standard input and decodes each object strictly into its type of k8s.io/api: an unknown or a
// misspelt field, a wrong type, and a field that is given twice are errors. Kinds of monitoring.coreos.com are decoded into the part of
// their types that the chart uses. With --json it prints each object as JSON in a line, else how many there were.
package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"regexp"

	appsv1 "k8s.io/api/apps/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	policyv1 "k8s.io/api/policy/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"
)

type serviceMonitor struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata"`
	Spec              struct {
		JobLabel  string               `json:"jobLabel"`
		Selector  metav1.LabelSelector `json:"selector"`
		Endpoints []struct {
			Port          string `json:"port"`
			Interval      string `json:"interval"`
			ScrapeTimeout string `json:"scrapeTimeout"`
		} `json:"endpoints"`
	} `json:"spec"`
}

type prometheusRule struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata"`
	Spec              struct {
		Groups []struct {
			Name  string `json:"name"`
			Rules []struct {
				Alert       string            `json:"alert"`
				Expr        string            `json:"expr"`
				For         string            `json:"for"`
				Labels      map[string]string `json:"labels"`
				Annotations map[string]string `json:"annotations"`
			} `json:"rules"`
		} `json:"groups"`
	} `json:"spec"`
}

var kinds = map[string]func() any{
	"v1/ConfigMap":                            func() any { return &corev1.ConfigMap{} },
	"v1/Secret":                               func() any { return &corev1.Secret{} },
	"v1/Service":                              func() any { return &corev1.Service{} },
	"apps/v1/StatefulSet":                     func() any { return &appsv1.StatefulSet{} },
	"apps/v1/Deployment":                      func() any { return &appsv1.Deployment{} },
	"batch/v1/CronJob":                        func() any { return &batchv1.CronJob{} },
	"policy/v1/PodDisruptionBudget":           func() any { return &policyv1.PodDisruptionBudget{} },
	"networking.k8s.io/v1/NetworkPolicy":      func() any { return &networkingv1.NetworkPolicy{} },
	"monitoring.coreos.com/v1/ServiceMonitor": func() any { return &serviceMonitor{} },
	"monitoring.coreos.com/v1/PrometheusRule": func() any { return &prometheusRule{} },
}

func main() {
	input, err := io.ReadAll(os.Stdin)
	if err != nil {
		fail("%v", err)
	}
	asJSON := len(os.Args) > 1 && os.Args[1] == "--json"
	count := 0
	for _, document := range regexp.MustCompile(`(?m)^---\s*$`).Split(string(input), -1) {
		var head metav1.TypeMeta
		if err := yaml.Unmarshal([]byte(document), &head); err != nil {
			fail("%v in\n%s", err, document)
		}
		if head.Kind == "" {
			if len(bytes.TrimSpace(regexp.MustCompile(`(?m)^#.*$`).ReplaceAll([]byte(document), nil))) > 0 {
				fail("no kind in\n%s", document)
			}
			continue
		}
		name := head.APIVersion + "/" + head.Kind
		kind, known := kinds[name]
		if !known {
			fail("%s: not a kind that this program knows", name)
		}
		object := kind()
		if err := yaml.UnmarshalStrict([]byte(document), object); err != nil {
			fail("%s: %v", name, err)
		}
		if asJSON {
			if err := json.NewEncoder(os.Stdout).Encode(object); err != nil {
				fail("%s: %v", name, err)
			}
		}
		count++
	}
	if count == 0 {
		fail("no object")
	}
	if !asJSON {
		fmt.Printf("%d objects\n", count)
	}
}

func fail(format string, arguments ...any) {
	fmt.Fprintf(os.Stderr, "decode: "+format+"\n", arguments...)
	os.Exit(1)
}
