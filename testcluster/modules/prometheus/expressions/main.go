// The metrics and labels of PromQL expressions, as Prometheus itself parses them.
//
// It reads a JSON list of expressions from standard input and prints one line of JSON for each, in the same order.
package main

import (
	"encoding/json"
	"fmt"
	"log"
	"os"
	"runtime/debug"

	"github.com/prometheus/common/model"
	"github.com/prometheus/prometheus/model/labels"
	"github.com/prometheus/prometheus/promql/parser"
)

const module = "github.com/prometheus/prometheus"

type matcher struct {
	Label string `json:"label"`
	Type  string `json:"type"`
	Value string `json:"value"`
}

type selector struct {
	Metric   string    `json:"metric"`
	Matchers []matcher `json:"matchers"`
}

type answer struct {
	Error     string     `json:"error"`
	Selectors []selector `json:"selectors"`
	// Labels that aggregations and binary operators name: by, without, on, ignoring, group_left, group_right.
	Labels []string `json:"labels"`
	// Labels that label_replace and label_join create.
	Created []string `json:"created"`
}

func main() {
	if len(os.Args) > 1 {
		printVersion()
		return
	}
	var expressions []string
	if err := json.NewDecoder(os.Stdin).Decode(&expressions); err != nil {
		log.Fatal(err)
	}
	for _, expression := range expressions {
		if err := json.NewEncoder(os.Stdout).Encode(parsed(expression)); err != nil {
			log.Fatal(err)
		}
	}
}

func parsed(expression string) answer {
	found := answer{Selectors: []selector{}, Labels: []string{}, Created: []string{}}
	tree, err := parser.NewParser(parser.Options{}).ParseExpr(expression)
	if err != nil {
		found.Error = err.Error()
		return found
	}
	parser.Inspect(tree, func(node parser.Node, _ []parser.Node) error {
		found.add(node)
		return nil
	})
	return found
}

func (found *answer) add(node parser.Node) {
	switch one := node.(type) {
	case *parser.VectorSelector:
		found.Selectors = append(found.Selectors, selectorOf(one))
	case *parser.AggregateExpr:
		found.Labels = append(found.Labels, one.Grouping...)
	case *parser.BinaryExpr:
		if one.VectorMatching != nil {
			found.Labels = append(found.Labels, one.VectorMatching.MatchingLabels...)
			found.Labels = append(found.Labels, one.VectorMatching.Include...)
		}
	case *parser.Call:
		found.addCall(one)
	}
}

// The arguments are: vector, created label, replacement, source label, regular expression.
func (found *answer) addCall(call *parser.Call) {
	if call.Func.Name != "label_replace" {
		return
	}
	found.Created = append(found.Created, text(call.Args[1]))
	found.Labels = append(found.Labels, text(call.Args[3]))
}

func text(expression parser.Expr) string {
	literal, _ := expression.(*parser.StringLiteral)
	return literal.Val
}

func selectorOf(vector *parser.VectorSelector) selector {
	found := selector{Matchers: []matcher{}}
	for _, one := range vector.LabelMatchers {
		if one.Name == model.MetricNameLabel && one.Type == labels.MatchEqual {
			found.Metric = one.Value
		} else {
			found.Matchers = append(found.Matchers, matcher{one.Name, one.Type.String(), one.Value})
		}
	}
	return found
}

func printVersion() {
	build, _ := debug.ReadBuildInfo()
	for _, dependency := range build.Deps {
		if dependency.Path == module {
			fmt.Println(dependency.Version)
		}
	}
}
