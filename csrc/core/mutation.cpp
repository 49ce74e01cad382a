#include "core/mutation.h"

#include <string>

#if defined(HSCACHE_MUTATIONS)
namespace hscache {
namespace {

std::string chosen;

}  // namespace

void choose_mutation(std::string_view name) { chosen = name; }
bool mutated(std::string_view name) { return name == chosen; }

}  // namespace hscache
#endif
