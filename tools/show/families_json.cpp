// SPDX-License-Identifier: Apache-2.0
#include "show/families_json.h"

#include <nlohmann/json.hpp>
#include <utility>

#include "families/families.h"

namespace flashmask::show {

nlohmann::ordered_json families_json() {
  using Json = nlohmann::ordered_json;
  Json list = Json::array();
  for (const Family& family : families()) {
    Json parameters = Json::array();
    for (const FamilyParameter& parameter : family.parameters)
      parameters.push_back({{"name", parameter.name}, {"help", parameter.help}});
    list.push_back({{"name", family.name}, {"definition", family.definition}, {"parameters", std::move(parameters)}});
  }
  return list;
}

}  // namespace flashmask::show
