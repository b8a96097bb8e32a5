// SPDX-License-Identifier: Apache-2.0
#include "mask/families/family.h"

#include <algorithm>

#include "common/json.h"
#include "mask/families/contents.h"
#include "mask/families/families.h"

namespace flashmask::build {
namespace {

/// The name of an enumerator of Kind, in its order.
constexpr std::string_view kKinds[] = {"length",
                                       "number",
                                       "reach",
                                       "flag",
                                       "tokens",
                                       "vector",
                                       "flags",
                                       "single",
                                       "pairs",
                                       "blocks",
                                       "documents",
                                       "documents_or_one",
                                       "documents_of_tokens"};
constexpr std::string_view kEdges[] = {"none", "causal", "diagonal", "reach", "given"};

std::string json_of(bool flag) { return flag ? "true" : "false"; }

std::string json_of(const Declared& p) {
  JsonObject json;
  json.add_string("name", p.name).add_string("kind", kKinds[static_cast<std::size_t>(p.kind)]);
  json.add_string("doc", p.doc).add("is_optional", json_of(p.is_optional || p.otherwise));
  if (p.least != INT64_MIN) json.add_number("least", p.least);
  if (p.otherwise) json.add_number("default", *p.otherwise);
  return json.text();
}

std::string json_of(const Form& form) {
  JsonObject json;
  json.add_number("vectors", form.numbers()).add_string("edges", kEdges[static_cast<std::size_t>(form.edges)]);
  json.add("has_positions", json_of(form.has_positions)).add_string("misfit", form.misfit);
  return json.add("has_lists", json_of(form.has_lists)).text();
}

std::string json_of(const Family& family) {
  std::vector<std::string> parameters, names;
  for (const Declared& p : family.parameters) parameters.push_back(json_of(p));
  for (const std::string_view name : names_of(family)) names.emplace_back(name);
  JsonObject json;
  json.add_string("name", family.name).add("parameters", json_array(parameters));
  json.add("names", json_string_array(names)).add("form", json_of(family.form));
  json.add_string("option", family.option).add("other_form", json_of(family.other));
  return json.add("has_order", json_of(family.has_order)).text();
}

}  // namespace

std::span<const Family* const> all_families() {
  static const std::vector<const Family*> all = [] {
    std::vector<const Family*> list;
    each_family([&list](auto own) { list.push_back(&decltype(own)::kFamily); }, Families{});
    return list;
  }();
  return all;
}

std::vector<std::string_view> names_of(const Family& family) {
  std::vector<std::string_view> names;
  const auto add = [&names](std::string_view name) {
    if (std::find(names.begin(), names.end(), name) == names.end()) names.push_back(name);
  };
  for (const Declared& p : family.parameters) {
    const bool are_documents = p.kind == Kind::kDocuments || p.kind == Kind::kDocumentsOrOne;
    if (are_documents || p.kind == Kind::kBlocks) add("seqlen");
    if (!are_documents && p.kind != Kind::kDocumentsOfTokens) {
      add(p.name);
      continue;
    }
    for (const auto& [name, form] : kSegmentForms) add(name);
  }
  if (family.has_order) add("order_out");
  add("unfit_out");
  return names;
}

std::string families_json() {
  std::vector<std::string> families;
  for (const Family* family : all_families()) families.push_back(json_of(*family));
  return JsonObject().add("families", json_array(families)).text();
}

}  // namespace flashmask::build
