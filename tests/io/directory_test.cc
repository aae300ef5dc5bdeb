// Bar S5: nothing outside the model root opens, and genuine layouts load, both with the kernel's
// resolver and with our own walk.
#include "io/directory.h"

#include "io/io_test_support.h"
#include "io/safetensors_open.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <string>
#include <sys/stat.h>
#include <unistd.h>
#include <vector>

namespace conclave::testing {
namespace {

namespace fs = std::filesystem;
using io::Directory;
using io::PathResolver;

class DirectoryTest : public ::testing::TestWithParam<PathResolver> {
 protected:
  DirectoryTest() {
    fs::create_directory(model_);
    fs::permissions(model_, fs::perms(0755));
  }

  std::optional<ErrorCode> open_in(const fs::path& directory, std::string_view name,
                                   std::string* content = nullptr) {
    return code_of([&] {
      const io::File file = Directory::open(directory, GetParam()).open_file(name);
      if (content != nullptr) *content = file.read_all();
    });
  }
  std::string code_in_model(std::string_view name) { return name_of(open_in(model_, name)); }

  TemporaryDirectory root_;
  const fs::path model_ = root_.path() / "model";
  const fs::path outside_ = root_.write("outside.safetensors", "secret");
};

TEST_P(DirectoryTest, HostileNames_Escape) {
  const std::vector<std::string> names = {"../outside.safetensors",
                                          "../../../../etc/passwd",
                                          "/etc/passwd",
                                          "//etc/passwd",
                                          "..",
                                          ".",
                                          "",
                                          "a/b.safetensors",
                                          "./a.safetensors",
                                          "a/../b.safetensors",
                                          "..\\outside.safetensors",
                                          "\\\\server\\share\\a.safetensors",
                                          "C:a.safetensors",
                                          "c:\\a.safetensors",
                                          "file:///etc/passwd",
                                          "https://host/a.safetensors",
                                          std::string("a.safetensors\0.bin", 17),
                                          std::string("\0", 1),
                                          "a\n.safetensors",
                                          "a\x7f.safetensors",
                                          "a/",
                                          "%2e%2e/a",
                                          "~/a.safetensors",
                                          std::string(256, 'a')};
  for (const std::string& name : names) {
    EXPECT_EQ(code_in_model(name), "kPathEscape") << name;
    EXPECT_EQ(name_of(code_of([&] { io::check_shard_name(name, "index.json"); })), "kPathEscape")
        << name;
    EXPECT_EQ(name_of(code_of([&] { Directory::open(model_, GetParam()).contains(name); })),
              "kPathEscape")
        << name;
  }
  fmt::print("S5: {} hostile names, escapes 0\n", names.size());
}

TEST_P(DirectoryTest, HostileLinks_Refused) {
  fs::create_directory(root_.path() / "model-other");
  root_.write("model-other/x.safetensors", "secret");
  fs::create_directory(model_ / "sub");
  const std::vector<std::pair<std::string, fs::path>> links = {
      {"absolute", outside_},
      {"parent", "../outside.safetensors"},
      {"sibling_with_the_same_prefix", "../model-other/x.safetensors"},
      {"out_and_in_again", "../model/inside.safetensors"},
      {"through_a_subdirectory", "sub/../../outside.safetensors"},
      {"far_up", "../../../../../../../../../../etc/passwd"},
      {"proc", "/proc/self/environ"},
      {"proc_root", fmt::format("/proc/self/root{}", outside_.string())},
      {"loop", "loop"},
      {"loop_of_two", "loop_back"},
      {"loop_back", "loop_of_two"},
      {"through_a_link", "escape_directory/outside.safetensors"},
      {"escape_directory", ".."},
  };
  root_.write("model/inside.safetensors", "inside");
  size_t escapes = 0;
  for (const auto& [name, target] : links) fs::create_symlink(target, model_ / name);
  for (const auto& [name, target] : links) {
    const auto code = open_in(model_, name);
    // The link to ".." is a directory above the root, which is an escape too.
    EXPECT_EQ(name_of(code), "kPathEscape") << name;
    if (!code) ++escapes;
  }
  fmt::print("S5: {} hostile links, escapes {}\n", links.size(), escapes);
}

TEST_P(DirectoryTest, LinksWithinTheModel_Open) {
  root_.write("model/real.safetensors", "inside");
  fs::create_directory(model_ / "sub");
  fs::create_symlink("real.safetensors", model_ / "a");
  fs::create_symlink("sub/../real.safetensors", model_ / "b");
  fs::create_symlink("./sub/./back", model_ / "c");
  fs::create_symlink("../real.safetensors", model_ / "sub" / "back");
  fs::create_symlink("sub", model_ / "linked_sub");
  fs::create_symlink("linked_sub/back", model_ / "d");
  for (const char* name : {"real.safetensors", "a", "b", "c", "d"}) {
    std::string content;
    EXPECT_EQ(open_in(model_, name, &content), std::nullopt) << name;
    EXPECT_EQ(content, "inside") << name;
  }
}

TEST_P(DirectoryTest, NotRegular_Refused) {
  ASSERT_EQ(mkfifo((model_ / "fifo").c_str(), 0600), 0);
  fs::create_directory(model_ / "directory");
  fs::create_symlink("directory", model_ / "link_to_directory");
  EXPECT_EQ(code_in_model("fifo"), "kFileNotRegular");
  EXPECT_EQ(code_in_model("directory"), "kFileNotRegular");
  EXPECT_EQ(code_in_model("link_to_directory"), "kFileNotRegular");
}

TEST_P(DirectoryTest, Missing_NotFound) {
  fs::create_symlink("nowhere", model_ / "dangling");
  fs::create_symlink("inside.safetensors/x", model_ / "below_a_file");
  root_.write("model/inside.safetensors", "");
  EXPECT_EQ(code_in_model("absent"), "kFileNotFound");
  EXPECT_EQ(code_in_model("dangling"), "kFileNotFound");
  EXPECT_EQ(code_in_model("below_a_file"), "kFileNotFound");
  const Directory directory = Directory::open(model_, GetParam());
  EXPECT_FALSE(directory.contains("absent"));
  EXPECT_TRUE(directory.contains("inside.safetensors"));
}

TEST_P(DirectoryTest, Unreadable_Access) {
  const fs::path path = root_.write("model/secret.safetensors", "x");
  ASSERT_EQ(chmod(path.c_str(), 0), 0);
  const Directory directory = Directory::open(model_, GetParam());
  // The superuser may read everything, so the test becomes someone else for a moment.
  const uid_t user = geteuid();
  if (user == 0) {
    ASSERT_EQ(seteuid(65534), 0);
  }
  const auto code = code_of([&] { directory.open_file("secret.safetensors"); });
  ASSERT_EQ(seteuid(user), 0);
  EXPECT_EQ(name_of(code), "kFileAccess");
}

// huggingface_hub lays out its cache like this: relative links from the snapshot into blobs.
struct HubCache {
  explicit HubCache(const TemporaryDirectory& root) : repository(root.path() / "models--org--moe") {
    root.write("models--org--moe/blobs/0a1b2c", "weights");
    root.write("models--org--moe/blobs/3d4e5f", R"({"a":1})");
    root.write("models--org--moe/refs/main", "0123abcd");
    fs::create_directories(snapshot);
    fs::create_symlink("../../blobs/0a1b2c", snapshot / "model.safetensors");
    fs::create_symlink("../../blobs/3d4e5f", snapshot / "config.json");
    root.write("models--org--other/blobs/ffff", "other");
  }
  fs::path repository;
  fs::path snapshot = repository / "snapshots" / "0123abcd";
};

TEST_P(DirectoryTest, HubCache_Loads) {
  const HubCache cache(root_);
  fs::create_directory_symlink(cache.snapshot, root_.path() / "link_to_snapshot");
  fs::create_directory_symlink(cache.repository, root_.path() / "link_to_repository");
  const std::vector<fs::path> directories = {
      cache.snapshot, cache.snapshot / "", cache.snapshot / ".." / "0123abcd",
      root_.path() / "link_to_snapshot", root_.path() / "link_to_repository/snapshots/0123abcd"};
  size_t false_rejects = 0;
  for (const fs::path& path : directories) {
    std::string content;
    const auto code = open_in(path, "model.safetensors", &content);
    EXPECT_EQ(code, std::nullopt) << path;
    EXPECT_EQ(content, "weights") << path;
    if (code) ++false_rejects;
    const auto document = Directory::open(path, GetParam()).read_json("config.json");
    EXPECT_EQ(document.root().at("a").as_int64(), 1);
    EXPECT_TRUE(Directory::open(path, GetParam()).contains("model.safetensors"));
  }
  fmt::print("S5: {} genuine cache layouts, false rejects {}\n", directories.size(), false_rejects);
}

TEST_P(DirectoryTest, HubCache_LinksOutOfTheRepositoryRefused) {
  const HubCache cache(root_);
  const std::vector<std::pair<std::string, fs::path>> links = {
      {"other_model", "../../../models--org--other/blobs/ffff"},
      {"up", "../../../outside.safetensors"},
      {"absolute", outside_},
      {"absolute_within", cache.repository / "blobs/0a1b2c"},
  };
  for (const auto& [name, target] : links) {
    fs::create_symlink(target, cache.snapshot / name);
    EXPECT_EQ(name_of(open_in(cache.snapshot, name)), "kPathEscape") << name;
  }
}

TEST_P(DirectoryTest, DirectoryThatOnlyLooksLikeACache_StaysBeneathItself) {
  for (const char* directory : {"models--x/0123", "org/snapshots/0123", "snapshots/0123"}) {
    const fs::path path = root_.path() / directory;
    fs::create_directories(path);
    fs::create_symlink("../../outside.safetensors", path / "model.safetensors");
    EXPECT_EQ(name_of(open_in(path, "model.safetensors")), "kPathEscape") << directory;
  }
}

TEST_P(DirectoryTest, OpenedFile_OutlivesItsName) {
  const fs::path path = root_.write("model/a.safetensors", safetensors("{}"));
  const Directory directory = Directory::open(model_, GetParam());
  io::File file = directory.open_file("a.safetensors");
  fs::remove(path);
  fs::create_symlink(outside_, path);
  EXPECT_EQ(io::open_safetensors(std::move(file)).tensors().size(), 0U);
}

std::string resolver_name(const ::testing::TestParamInfo<PathResolver>& param) {
  return param.param == PathResolver::kAuto ? "kernel" : "walk";
}

INSTANTIATE_TEST_SUITE_P(Resolvers, DirectoryTest,
                         ::testing::Values(PathResolver::kAuto, PathResolver::kWalk),
                         resolver_name);

TEST(Directory, NotADirectory_Refused) {
  const TemporaryDirectory root;
  const fs::path file = root.write("file", "x");
  ASSERT_EQ(mkfifo((root.path() / "fifo").c_str(), 0600), 0);
  EXPECT_EQ(name_of(code_of([&] { Directory::open(file); })), "kFileNotRegular");
  EXPECT_EQ(name_of(code_of([&] { Directory::open(root.path() / "fifo"); })), "kFileNotRegular");
  EXPECT_EQ(name_of(code_of([&] { Directory::open(root.path() / "absent"); })), "kFileNotFound");
  EXPECT_EQ(name_of(code_of([&] { Directory::open(file / "below"); })), "kFileNotFound");
}

TEST(Directory, JsonBeyondItsLimit_RefusedUnread) {
  const TemporaryDirectory root;
  root.write("config.json", std::string(101, ' '));
  const Directory directory = Directory::open(root.path());
  EXPECT_EQ(name_of(code_of([&] { directory.read_json("config.json", {.max_bytes = 100}); })),
            "kJsonTooLarge");
}

TEST(ShardName, OtherFormats_Forbidden) {
  for (const char* name : {"pytorch_model.bin", "model.pt", "model.ckpt", "model.pkl", "model.npz",
                           "model.h5", "model.gguf", "model", "model.safetensors.bin"}) {
    EXPECT_EQ(name_of(code_of([&] { io::check_shard_name(name, "index.json"); })),
              "kForbiddenFormat")
        << name;
  }
  for (const char* name : {"model.safetensors", "model-00001-of-00002.safetensors", "..safetensors",
                           "...safetensors", "modèle.safetensors", "a b.safetensors"}) {
    EXPECT_EQ(code_of([&] { io::check_shard_name(name, "index.json"); }), std::nullopt) << name;
  }
}

}  // namespace
}  // namespace conclave::testing
