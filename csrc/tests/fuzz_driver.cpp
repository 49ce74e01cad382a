// In libFuzzer's place, where there is no clang: FOLDER COUNT SEED runs every file of a corpus,
// then as many inputs drawn from the seed, half of them files with a few bytes changed.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <vector>

#include "tests/layouts.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);

int main(int count, char** arguments) {
  if (count != 4) {
    std::fprintf(stderr, "usage: %s FOLDER COUNT SEED\n", arguments[0]);
    return 2;
  }
  using Bytes = std::vector<std::uint8_t>;
  std::vector<std::filesystem::path> paths;
  for (const auto& entry : std::filesystem::directory_iterator(arguments[1])) {
    paths.push_back(entry.path());
  }
  std::sort(paths.begin(), paths.end());
  std::vector<Bytes> corpus;
  for (const auto& path : paths) {
    std::ifstream file(path, std::ios::binary);
    corpus.emplace_back(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
    LLVMFuzzerTestOneInput(corpus.back().data(), corpus.back().size());
  }
  hscache::test::Random random(std::strtoull(arguments[3], nullptr, 10));
  const std::int64_t rounds = std::atoll(arguments[2]);
  for (std::int64_t i = 0; i < rounds; ++i) {
    Bytes input(static_cast<std::size_t>(random.in(0, 80)));
    for (std::uint8_t& byte : input) byte = static_cast<std::uint8_t>(random.bits());
    if (!corpus.empty() && random.chance(50)) {
      input = corpus[static_cast<std::size_t>(random.bits() % corpus.size())];
      for (std::int64_t changes = random.in(1, 4); changes > 0 && !input.empty(); --changes) {
        input[static_cast<std::size_t>(random.bits() % input.size())] =
            static_cast<std::uint8_t>(random.bits());
      }
    }
    LLVMFuzzerTestOneInput(input.data(), input.size());
  }
  std::printf("%zu files, %lld drawn inputs\n", corpus.size(), static_cast<long long>(rounds));
  return corpus.empty();
}
